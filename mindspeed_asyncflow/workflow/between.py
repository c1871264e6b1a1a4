"""What somebody outside wants done between two steps, for instance a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from mindspeed_asyncflow.errors import ServiceError, WeightSyncError

Work = Callable[[int], Awaitable[Any]]  # is told how many steps are made


class Between:
    """Lives in the driver's event loop; `tell` wakes a train loop that waits for its next batch."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._waiting: list[tuple[Work, asyncio.Future[Any]]] = []

    def ask(self, work: Work) -> asyncio.Future[Any]:
        """What `work` gives. It is not begun any more once the future is cancelled."""
        asked: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, asked))
        self._tell()
        return asked

    @property
    def wanted(self) -> bool:
        return any(not asked.done() for _, asked in self._waiting)

    async def do(self, step: int) -> None:
        """All of it, in the order in which it came. Errors go to those who asked; with weights that are wrong the run
        must not go on either."""
        while self._waiting:
            work, asked = self._waiting[0]  # it stays there meanwhile, for `close`
            if not asked.done():
                await self._carry_out(work, asked, step)
            del self._waiting[0]

    async def _carry_out(self, work: Work, asked: asyncio.Future[Any], step: int) -> None:
        try:
            result = await work(step)
        except Exception as error:  # boundary: the run goes on, whoever asked is told
            if not asked.done():
                asked.set_exception(error)
            if isinstance(error, WeightSyncError):
                raise
            return
        if not asked.done():
            asked.set_result(result)

    def close(self) -> None:
        """The loops have ended: nobody does any more what was asked for, begun or not."""
        for _, asked in self._waiting:
            if not asked.done():
                asked.set_exception(
                    ServiceError(503, "recovering", "the loops of the run have ended meanwhile: it recovers or ends")
                )
        self._waiting.clear()
