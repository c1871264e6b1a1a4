"""How large and how many requests may be. Headers are looked at before a byte of the body is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.web import tensors
from mindspeed_asyncflow.workflow.clock import in_time, now

JSON_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one server. JSON takes many times its bytes in memory once it is read: large values travel as tensors."""

    body_bytes: int = 1 << 30  # with tensors
    json_bytes: int = JSON_BYTES  # without
    held_bytes: int = 2 << 30  # of all bodies of one tenant that are read at once
    at_once: int = 512  # calls of one tenant, most of which wait
    headers: int = 64
    pause_s: float = 30.0  # longest silence within a body
    body_s: float = 60.0  # how long a body may come slower than `body_rate`
    body_rate: float = 128 << 10  # bytes per second

    @classmethod
    def of(cls, body_mb: int) -> Limits:
        """Bodies of at most so many MiB, two of the largest at the same time."""
        size = body_mb << 20
        return cls(size, min(size, JSON_BYTES), 2 * size)


class Load:
    """What is being done now."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calls: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # bytes of each tenant: none shuts another one out

    @contextlib.contextmanager
    def call(self, tenant: str) -> Iterator[None]:
        """Raises `ServiceError` where the tenant has too many."""
        if self._calls[tenant] >= self._limits.at_once:
            raise ServiceError(429, "busy", f"{self._limits.at_once} calls are in progress; wait for one of them")
        self._calls[tenant] += 1
        try:
            yield
        finally:
            self._calls[tenant] -= 1

    @contextlib.contextmanager
    def body(self, tenant: str, size: int | None, longest: int) -> Iterator[Body]:
        """Of a request whose header says `size` bytes (None: it does not say)."""
        body = Body(self, tenant, longest, self._limits)
        try:
            body.add(size or 0, as_told=size is not None)
            yield body
        finally:
            self._held[tenant] -= body.held

    def hold(self, tenant: str, size: int) -> None:
        if self._held[tenant] + size > self._limits.held_bytes:
            raise ServiceError(429, "busy", "your bodies that are being read fill the memory for them; try again")
        self._held[tenant] += size


class Body:
    """What comes of one request."""

    def __init__(self, load: Load, tenant: str, longest: int, limits: Limits) -> None:
        self._load, self._tenant, self._longest, self._limits = load, tenant, longest, limits
        self.held = 0
        self._told: int | None = None
        self._begun: float | None = None  # when it was asked for
        self._came = 0

    def add(self, size: int, as_told: bool = False) -> None:
        """Before these bytes are kept."""
        if as_told:
            self._told = size
        elif self._told is not None:
            return  # the server ends a body where its header said
        if self.held + size > self._longest:
            raise ServiceError(413, "too_large", too_large(self.held + size, self._longest))
        self._load.hold(self._tenant, size)
        self.held += size

    async def next(self, receive: Any) -> Any:
        """The next message of it."""
        limits = self._limits
        self._begun = now() if self._begun is None else self._begun
        left_s = self._begun + limits.body_s + self._came / limits.body_rate - now()
        slow = f"the body came slower than {limits.body_rate / 1024:g} KiB/s for {limits.body_s:g} s"
        if left_s <= 0:
            raise ServiceError(408, "slow_body", slow)
        try:
            message = await in_time(receive(), min(limits.pause_s, left_s))
        except (TimeoutError, asyncio.TimeoutError):
            silent = f"no byte of the body came for {limits.pause_s:g} s"
            raise ServiceError(408, "slow_body", silent if limits.pause_s <= left_s else slow) from None
        self._came += len(message.get("body", b""))
        return message


def too_large(size: int, longest: int) -> str:
    return (
        f"a body of {size} bytes or more; at most {longest} are read "
        f"(JSON is limited more than {tensors.CONTENT_TYPE}, which is for large values)"
    )


def inspected(headers: list[tuple[bytes, bytes]], limits: Limits) -> tuple[int | None, int]:
    """Content-Length (None: a body in chunks, or none) and most bytes of the body."""
    if len(headers) > limits.headers:
        raise ServiceError(431, "too_many_headers", f"{len(headers)} headers; at most {limits.headers} are read")
    said = [value for name, value in headers if name == b"content-length"]
    kind = next((value for name, value in headers if name == b"content-type"), b"")
    longest = limits.body_bytes if kind.startswith(tensors.CONTENT_TYPE.encode()) else limits.json_bytes
    if not said:
        return None, longest
    if len(set(said)) > 1 or not said[0].isdigit():
        raise ServiceError(400, "bad_length", "Content-Length is one number")
    return int(said[0][:20]), longest
