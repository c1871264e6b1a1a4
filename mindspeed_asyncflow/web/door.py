"""What every request passes before anything of it is read: limits of headers and sizes, then the token."""

from __future__ import annotations

from typing import Any

from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.web import wire
from mindspeed_asyncflow.web.limits import Body, Limits, Load, inspected
from mindspeed_asyncflow.web.security import Tenants

OPEN = ("/", "/docs", "/openapi.json", "/health")  # say nothing of a run
TENANT = "tenant"  # in the state of a request that was let in


class Door:
    """An ASGI application before another one. What it refuses is answered `{"error": {"code", "message"}}`."""

    def __init__(self, app: Any, tenants: Tenants, limits: Limits) -> None:
        self._app, self._tenants, self._limits = app, tenants, limits
        self._load = Load(limits)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            size, longest = inspected(scope["headers"], self._limits)
            is_open = scope["path"] in OPEN and scope["method"] in ("GET", "HEAD")
            tenant = "" if is_open else self._tenants.admit(dict(scope["headers"]))
            with self._load.call(tenant), self._load.body(tenant, size, longest) as body:
                scope.setdefault("state", {})[TENANT] = tenant
                await self._app(scope, self._watched(receive, body), send)
        except ServiceError as error:
            await refuse(error, scope["path"], send)

    def _watched(self, receive: Any, body: Body) -> Any:
        whole = False

        async def watched() -> Any:
            nonlocal whole
            if whole:
                return await receive()
            message = await body.next(receive)
            if message["type"] == "http.request":
                whole = not message.get("more_body", False)
                body.add(len(message.get("body", b"")))
            return message

        return watched


def error_body(error: ServiceError, path: str) -> dict[str, Any]:
    """As the clients of that path expect it: those of OpenAI's interface know more fields."""
    told: dict[str, Any] = {"code": error.code, "message": str(error)}
    if path.startswith("/v1/"):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        told |= {"type": kind, "param": None}
    return {"error": told}


async def refuse(error: ServiceError, path: str, send: Any) -> None:
    """The connection ends: the rest of the request is not read."""
    content = wire.to_json(error_body(error, path))
    headers = [
        (b"content-type", wire.JSON.encode()),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),
    ]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
