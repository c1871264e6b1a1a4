"""The clock of the loops: that of the running event loop, so that a loop on virtual time drives the same code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def now() -> float:
    """Monotonic seconds; only differences mean something."""
    return asyncio.get_running_loop().time()


async def in_time(work: Coroutine[Any, Any, T], limit_s: float | None) -> T:
    """As `asyncio.wait_for`, which before Python 3.12 forgets that its caller was cancelled if `work` ends in the same
    moment. Raises `asyncio.TimeoutError`."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=limit_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        raise asyncio.TimeoutError
    return task.result()
