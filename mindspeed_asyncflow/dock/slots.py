"""Numbers of rows and groups: handed out, taken back, used again."""

from __future__ import annotations

import numpy as np


class Ring:
    """First-in first-out store of numbers."""

    def __init__(self) -> None:
        self._ring = np.zeros(256, np.int64)
        self._head = 0
        self.held = 0

    def take(self, count: int) -> np.ndarray:
        """The first `count` numbers, fewer when there are not so many."""
        count = min(count, self.held)
        end = self._head + count
        if end <= len(self._ring):
            taken = self._ring[self._head : end].copy()
        else:
            taken = np.concatenate((self._ring[self._head :], self._ring[: end - len(self._ring)]))
        self._head = end % len(self._ring)
        self.held -= count
        return taken

    def give(self, numbers: np.ndarray) -> None:
        size = len(self._ring)
        if self.held + len(numbers) > size:
            grown = np.zeros(max(2 * size, self.held + len(numbers)), np.int64)
            grown[: self.held] = np.roll(self._ring, -self._head)[: self.held]
            self._ring, self._head, size = grown, 0, len(grown)
        begin = (self._head + self.held) % size
        first = min(len(numbers), size - begin)
        self._ring[begin : begin + first] = numbers[:first]
        self._ring[: len(numbers) - first] = numbers[first:]
        self.held += len(numbers)


class Pool(Ring):
    """Numbers 0, 1, 2, ... handed out and taken back; the longest unused one comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.used_up_to = 0

    def take(self, count: int) -> np.ndarray:
        old = min(count, self.held)
        fresh = np.arange(self.used_up_to, self.used_up_to + count - old)
        self.used_up_to += len(fresh)
        if not old:
            return fresh
        recycled = super().take(old)
        return np.concatenate((recycled, fresh)) if len(fresh) else recycled

    def force(self, numbers: np.ndarray) -> None:
        """Takes exactly `numbers`, none of which is in use. Looks at all idle ones: for a restart."""
        idle = super().take(self.held)
        top = int(numbers.max(initial=-1)) + 1
        if top > self.used_up_to:
            idle = np.concatenate((idle, np.arange(self.used_up_to, top)))
            self.used_up_to = top
        self.give(idle[~np.isin(idle, numbers)])
