"""What somebody outside wants done between two steps, for instance a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

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
        """All of it, in the order in which it came. Errors go to those who asked."""
        while self._waiting:
            work, asked = self._waiting.pop(0)
            if asked.done():
                continue
            try:
                result = await work(step)
            except Exception as error:  # boundary: the run goes on, whoever asked is told
                if not asked.done():
                    asked.set_exception(error)
                continue
            if not asked.done():
                asked.set_result(result)
