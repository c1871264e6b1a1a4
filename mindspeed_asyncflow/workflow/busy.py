"""How long each side of a run works."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator


class BusyClock:
    """Seconds that each side spent working, also in the middle of a piece of work."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._total: defaultdict[str, float] = defaultdict(float)
        self._since: dict[str, float] = {}
        self._depth: Counter[str] = Counter()  # a replica may load weights while it answers

    @contextlib.contextmanager
    def __call__(self, side: str) -> Iterator[None]:
        self._depth[side] += 1
        if self._depth[side] == 1:
            self._since[side] = self._clock()
        try:
            yield
        finally:
            self._depth[side] -= 1
            if not self._depth[side]:
                self._total[side] += self._clock() - self._since.pop(side)

    def seconds(self, side: str) -> float:
        running = self._clock() - self._since[side] if side in self._since else 0.0
        return self._total[side] + running
