"""What every endpoint does: read a body within the limits, wait as long as the caller is there, answer, stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response, StreamingResponse

from mindspeed_asyncflow.errors import DeadlineExceeded, ServiceError
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.web import wire
from mindspeed_asyncflow.web.door import TENANT, error_body

GRACE_S = 15.0  # beyond what the caller allows, for a call that ends by itself
BEAT_S = 5.0  # an empty line so often, in a stream that has nothing to say
_LARGE = 1 << 20  # bytes that are read in a thread, as the loop has others to serve
_PIECE = 1 << 20

M = TypeVar("M", bound=BaseModel)

described: dict[str, type[BaseModel]] = {}  # what `body_schema` refers to by name


class ClientGone(Exception):
    """Nobody is there to hear the answer."""


def tenant_of(request: Request) -> str:
    return request.scope["state"][TENANT]


async def read_json(request: Request, model: type[M]) -> M:
    """The body as JSON. Raises `ServiceError` that names the field."""
    return await read(request, model, (wire.JSON,))


async def read(request: Request, model: type[M], kinds: tuple[str, ...] = (wire.JSON, wire.TENSORS)) -> M:
    """The body by one of these content types; no body at all is `{}`."""
    said = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = bytearray()
    async for part in request.stream():
        body += part
    if body and said not in kinds:
        raise ServiceError(415, "unsupported_type", f"Content-Type {said[:60]!r}; this call takes {' or '.join(kinds)}")
    if len(body) > _LARGE:
        return await asyncio.to_thread(_understood, said, body, model)
    return _understood(said, body, model)


def _understood(kind: str, body: bytearray, model: type[M]) -> M:
    try:
        document = wire.unpack(kind, body) if body else {}
        return model.model_validate(document)
    except ValidationError as error:
        raise ServiceError(400, "bad_request", in_words(error)) from None
    except ValueError as error:
        raise ServiceError(400, "bad_body", f"the body cannot be read as {kind}: {str(error)[:500]}") from None


def in_words(error: ValidationError) -> str:
    """The first few findings, each with its field."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    words = []
    for item in found[:3]:
        where = ".".join(str(step)[:80] for step in item["loc"]) or "body"
        why = "unknown field" if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
        words.append(f"{where}: {why[:300]}")
    rest = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(words) + rest


async def unless_gone(request: Request, work: Awaitable[Any], limit_s: float) -> Any:
    """What `work` comes to. It is cancelled when the client goes away (`ClientGone`) or at `limit_s`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGone
        raise ServiceError(408, "timeout", f"no answer within {limit_s:g} s; timeout_s of the call may be longer")
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.wait({task, gone})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def answer(request: Request, work: Awaitable[Any], limit_s: float) -> Response:
    """The document that `work` comes to, with tensors where the client accepts them."""
    try:
        document = await unless_gone(request, work, limit_s)
    except ClientGone:
        return Response(status_code=204)
    if wire.TENSORS in request.headers.get("accept", ""):
        kind, parts = wire.pack(document)
        return Parts(parts, kind)
    return Response(wire.to_json(document), media_type=wire.JSON)


class Parts(Response):
    """Buffers one after the other, in pieces, so that the loop serves others between them."""

    def __init__(self, parts: list[Any], kind: str) -> None:
        super().__init__(b"", media_type=kind, headers={"content-length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for part in self._parts:
            view = memoryview(part)
            for at in range(0, len(view), _PIECE):
                await send({"type": "http.response.body", "body": view[at : at + _PIECE], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def lines(stream: AsyncIterator[Mapping[str, Any]], limit_s: float) -> Response:
    """One line of JSON per item. What is wrong with the call at once is its answer; what goes wrong later, the last
    line: {"error": ...}. `{"end": true}` is the last line of a stream that is complete; `{"timeout": true}` of one that
    was not within `limit_s`."""
    until = asyncio.get_running_loop().time() + limit_s
    pull = _Pull(stream)
    try:
        await pull.ready(min(BEAT_S, limit_s))
        pull.refuse_failure()
    except BaseException:
        await pull.close()
        raise
    return StreamingResponse(_lines(pull, until), media_type=wire.LINES)


async def _lines(pull: _Pull, until: float) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    try:
        while True:
            if await pull.ready(max(0.0, min(BEAT_S, until - clock()))):
                if (item := pull.take()) is None:
                    yield b'{"end":true}\n'
                    return
                yield wire.to_json(item) + b"\n"
            elif clock() >= until:
                yield b'{"timeout":true}\n'
                return
            else:
                yield b"\n"
    except Exception as error:  # boundary: the headers are gone, so the fault is told in the stream
        known = as_service_error(error)
        told = error_body(known, "")["error"] | {"status": known.status}
        yield wire.to_json({"error": told}) + b"\n"
    finally:
        await pull.close()


class _Pull:
    """The next item of a stream, waited for in steps."""

    def __init__(self, stream: AsyncIterator[Any]) -> None:
        self._stream = stream
        self._next: asyncio.Future[Any] | None = None

    async def ready(self, limit_s: float) -> bool:
        if self._next is None:
            self._next = asyncio.ensure_future(_step(self._stream))
        done, _ = await asyncio.wait({self._next}, timeout=limit_s)
        return bool(done)

    def refuse_failure(self) -> None:
        if self._next is not None and self._next.done() and isinstance(failure := self._next.exception(), Exception):
            raise failure

    def take(self) -> Any:
        """What is ready; None at the end."""
        assert self._next is not None
        item = self._next.result()
        self._next = None
        return item

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
        close = getattr(self._stream, "aclose", None)
        if close is not None:
            with contextlib.suppress(Exception):
                await close()


async def _step(stream: AsyncIterator[Any]) -> Any:
    return await anext(stream, None)


def as_service_error(error: Exception) -> ServiceError:
    """How a fault is answered. What is not the caller's is logged whole and told in one word."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, DeadlineExceeded):
        return ServiceError(408, "timeout", str(error))
    get_logger("web").error("a call failed: %s: %s", type(error).__name__, error, exc_info=error)
    return ServiceError(500, "internal", "the server failed in this call; its log says more")


def body_schema(model: type[BaseModel], *, tensors: bool = False) -> dict[str, Any]:
    """`openapi_extra` of an endpoint that reads `model` itself."""
    described[model.__name__] = model
    content: dict[str, Any] = {wire.JSON: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    if tensors:
        content[wire.TENSORS] = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"content": content, "required": True}}
