"""The service interface over HTTP: one POST per verb, two GETs, and a page that describes them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from mindspeed_asyncflow import __version__
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.service.verbs import Experience, Verbs
from mindspeed_asyncflow.web import bodies, completions, wire
from mindspeed_asyncflow.web.bodies import LONGEST_WAIT_S
from mindspeed_asyncflow.web.calls import GRACE_S, answer, as_service_error, body_schema, lines, read, tenant_of
from mindspeed_asyncflow.web.door import Door, error_body
from mindspeed_asyncflow.web.limits import Limits
from mindspeed_asyncflow.web.page import complete_schema, page
from mindspeed_asyncflow.web.security import Tenants

DESCRIPTION = """Drives a training run from outside its processes. Every call needs `Authorization: Bearer TOKEN`.

A body is JSON, or arrays travel beside the JSON in the safetensors format (`application/x-safetensors`): the metadata
entry `document` is the JSON, and a tensor is named by its place in it, as `columns/rewards`; rows of different lengths
are two tensors, all values one after the other and `NAME:lengths`. `Accept: application/x-safetensors` asks for such
answers. In JSON, `null` in a list of numbers is NaN. Whatever goes wrong is answered
`{"error": {"code": ..., "message": ...}}`. Streams have one JSON object per line; empty lines only say that the server
is there, and the last line is `{"end": true}`, `{"timeout": true}` or an error.
"""


def make_app(verbs: Verbs, tenants: Tenants, limits: Limits | None = None) -> Door:
    """The ASGI application over `verbs`, behind its door."""
    app = FastAPI(
        title="mindspeed_asyncflow",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.include_router(_verbs(verbs))
    app.include_router(_beside(verbs))
    app.include_router(completions.router(verbs))
    schema = complete_schema(app)
    described = page(schema)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(schema)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(described)

    @app.get("/health", include_in_schema=False)
    async def health() -> Response:
        return JSONResponse({"ok": True})

    app.add_exception_handler(RequestValidationError, _bad_query)
    app.add_exception_handler(HTTPException, _no_such_path)
    app.add_exception_handler(ServiceError, _refused)
    app.add_exception_handler(Exception, _refused)
    return Door(app, tenants, limits or Limits())


def _verbs(verbs: Verbs) -> APIRouter:
    api = APIRouter(prefix="/api", tags=["the five verbs"])

    @api.post("/init_engines", **_about(bodies.InitEngines, "Start the run; a line for each phase, `ready` at last."))
    async def init_engines(request: Request) -> Response:
        body = await read(request, bodies.InitEngines)
        return await lines(verbs.init_engines(tenant_of(request), body.overrides), body.timeout_s)

    @api.post("/put_prompts_data", **_about(bodies.PutPrompts, "Hand over prompts, which are answered in this order."))
    async def put_prompts_data(request: Request) -> Response:
        body = await read(request, bodies.PutPrompts)
        prompts = [prompt.made() for prompt in body.prompts]
        return await answer(request, verbs.put_prompts_data(tenant_of(request), prompts, body.last), LONGEST_WAIT_S)

    @api.post(
        "/get_experience_data",
        **_about(bodies.GetExperience, "Claim whole groups that wait for a task; `claim` 0: none came in time."),
    )
    async def get_experience_data(request: Request) -> Response:
        body = await read(request, bodies.GetExperience)
        tenant, wait_s = tenant_of(request), body.timeout_s
        work = verbs.get_experience_data(tenant, body.task, body.columns, body.groups, wait_s)
        return await answer(request, _told(work), wait_s + GRACE_S)

    @api.post("/put_experience_data", **_about(bodies.PutExperience, "Write columns of a claim's rows, and end it."))
    async def put_experience_data(request: Request) -> Response:
        body = await read(request, bodies.PutExperience)
        work = verbs.put_experience_data(tenant_of(request), body.claim, body.rows, body.columns)
        return await answer(request, work, LONGEST_WAIT_S)

    @api.post("/put_trajectories", **_about(bodies.PutTrajectories, "Answers that came about outside, to be trained."))
    async def put_trajectories(request: Request) -> Response:
        body = await read(request, bodies.PutTrajectories)
        groups = [group.made() for group in body.groups]
        return await answer(request, verbs.put_trajectories(tenant_of(request), groups), LONGEST_WAIT_S)

    @api.post("/weight_sync_notify", **_about(bodies.Notify, "Wait until every replica serves a version."))
    async def weight_sync_notify(request: Request) -> Response:
        body = await read(request, bodies.Notify)
        work = verbs.weight_sync_notify(tenant_of(request), body.version, body.timeout_s)
        return await answer(request, work, body.timeout_s + GRACE_S)

    return api


def _beside(verbs: Verbs) -> APIRouter:
    api = APIRouter(prefix="/api", tags=["beside them"])

    @api.get("/status", **_about(None, "What the run is doing."))
    async def status(request: Request) -> Response:
        return await answer(request, verbs.status(tenant_of(request)), GRACE_S)

    @api.get("/metrics", **_about(None, "The record of every step from `since` on, a line each, until the run ends."))
    async def metrics(
        request: Request,
        since: Annotated[int, Query(ge=0, le=2**53)] = 0,
        timeout_s: Annotated[float, Query(ge=0, le=LONGEST_WAIT_S)] = LONGEST_WAIT_S,
    ) -> Response:
        return await lines(verbs.metrics(tenant_of(request), since), timeout_s)

    def waiting(name: str, summary: str) -> None:
        async def call(request: Request) -> Response:
            body = await read(request, bodies.Waiting)
            work = getattr(verbs, name)(tenant_of(request), body.timeout_s)
            return await answer(request, work, body.timeout_s + GRACE_S)

        api.post(f"/{name}", name=name, **_about(bodies.Waiting, summary))(call)

    waiting("evaluate", "Answer the held-out prompts by the newest weights.")
    waiting("checkpoint", "Save everything between this step and the next; answers when it is complete.")
    waiting("export", "Write the newest checkpoint as a Hugging Face folder.")

    @api.post("/stop", **_about(bodies.Stop, "End the run; its summary."))
    async def stop(request: Request) -> Response:
        body = await read(request, bodies.Stop)
        return await answer(request, verbs.stop(tenant_of(request), body.now), body.timeout_s + GRACE_S)

    return api


async def _told(work: Any) -> dict[str, Any]:
    found: Experience = await work
    rows = {"rows": found.rows, "groups": found.groups, "members": found.members}
    return {"claim": found.claim, **rows, "columns": dict(found.columns)}


def _about(model: type[BaseModel] | None, summary: str) -> dict[str, Any]:
    told: dict[str, Any] = {"summary": summary, "response_class": Response}
    if model is not None:
        told["openapi_extra"] = body_schema(model, tensors=True)
    return told


async def _refused(request: Request, error: Exception) -> Response:
    known = as_service_error(error)
    headers = {"retry-after": "1"} if known.status == 429 else {}
    if known.status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    content = wire.to_json(error_body(known, request.url.path))
    return Response(content, known.status, headers, media_type=wire.JSON)


async def _bad_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors()[:3])
    return await _refused(request, ServiceError(400, "bad_request", found[:500]))


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "bad_request"
    told = ServiceError(error.status_code, code, f"{error.detail}; the calls are listed on /docs")
    response = await _refused(request, told)
    response.headers.update(error.headers or {})
    return response
