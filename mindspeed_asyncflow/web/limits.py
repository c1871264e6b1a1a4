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
from mindspeed_asyncflow.workflow.clock import in_time

JSON_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one server. JSON takes many times its bytes in memory once it is read: large values travel as tensors."""

    body_bytes: int = 1 << 30  # with tensors
    json_bytes: int = JSON_BYTES  # without
    held_bytes: int = 2 << 30  # of all bodies that are read at once
    at_once: int = 512  # calls of one tenant, most of which wait
    headers: int = 64
    pause_s: float = 30.0  # longest silence within a body

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
        self._held = 0

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
    def body(self, size: int | None, longest: int) -> Iterator[_Body]:
        """Of a request whose header says `size` bytes (None: it does not say)."""
        body = _Body(self, longest)
        try:
            body.add(size or 0, as_told=size is not None)
            yield body
        finally:
            self._held -= body.held

    def hold(self, size: int) -> None:
        if self._held + size > self._limits.held_bytes:
            raise ServiceError(429, "busy", "the bodies that are being read fill the memory for them; try again")
        self._held += size


class _Body:
    def __init__(self, load: Load, longest: int) -> None:
        self._load, self._longest = load, longest
        self.held = 0
        self._told: int | None = None

    def add(self, size: int, as_told: bool = False) -> None:
        """Before these bytes are kept."""
        if as_told:
            self._told = size
        elif self._told is not None:
            return  # the server ends a body where its header said
        if self.held + size > self._longest:
            raise ServiceError(413, "too_large", too_large(self.held + size, self._longest))
        self._load.hold(size)
        self.held += size


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


async def soon(receive: Any, limits: Limits) -> Any:
    """The next message of a body."""
    try:
        return await in_time(receive(), limits.pause_s)
    except (TimeoutError, asyncio.TimeoutError):
        raise ServiceError(408, "slow_body", f"no byte of the body came for {limits.pause_s:g} s") from None
