"""From one event loop to another: the run lives in that of the main thread, its callers in that of the web server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

from mindspeed_asyncflow.errors import ServiceError

T = TypeVar("T")


async def carried(loop: asyncio.AbstractEventLoop, items: AsyncIterator[T]) -> AsyncGenerator[T]:
    """What `items`, which lives in `loop`, gives, in the loop of the caller. It is closed there when the caller closes
    this one, and what it raises is raised here. Raises `ServiceError` where that loop ends before it does."""
    here, mailbox = asyncio.get_running_loop(), asyncio.Queue[Any]()
    end = object()

    def hand_over(item: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop has gone
            here.call_soon_threadsafe(mailbox.put_nowait, item)

    async def bring() -> None:
        try:
            async for item in items:
                hand_over(item)
        finally:
            if isinstance(items, AsyncGenerator):
                await items.aclose()

    work = bring()
    try:
        bringing = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError as error:  # it is closed
        work.close()
        raise _ended() from error
    bringing.add_done_callback(lambda done: hand_over(end))
    try:
        while (item := await mailbox.get()) is not end:
            yield item
        if bringing.cancelled():
            raise _ended()
        bringing.result()
    finally:
        bringing.cancel()


def _ended() -> ServiceError:
    return ServiceError(409, "ended", "the run has ended")
