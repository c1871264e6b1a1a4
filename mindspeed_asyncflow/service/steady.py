"""An event loop whose clock stands still while this process does: a driver that was stopped and goes on has missed no
deadline, since those that it waits for were not late."""

from __future__ import annotations

import asyncio

PAUSE_S = 5.0  # a loop that always has a timer of a second or less asks for the time more often than that


class SteadyLoop(asyncio.SelectorEventLoop):
    """Leaves out whatever lies between two looks at the clock when that is longer than `pause_s`."""

    def __init__(self, pause_s: float = PAUSE_S) -> None:
        self._pause_s, self._left_out, self._seen = pause_s, 0.0, float("inf")
        super().__init__()

    def time(self) -> float:
        moment = super().time()
        gap = moment - self._seen
        if gap > self._pause_s:
            self._left_out += gap
        self._seen = moment
        return moment - self._left_out
