"""Free granules of an arena as sorted runs."""

from __future__ import annotations

import numpy as np

_SOME = 32  # returned runs that are not worth a merge
_FEW = 4096  # runs: up to here a merge is cheap
_MEMOS = 32  # sizes for which it is known where a search may begin
_BLOCK = 4096


class FreeList:
    """Free granules as sorted, disjoint runs; first fit.

    Cost with many runs: a search begins where the last one for this size (or a smaller one) ended, since runs only
    shrink between two merges; returned runs are merged when they are many for the list, or when nothing fits.
    """

    def __init__(self, start: int, end: int) -> None:
        self._starts = np.array([start], np.int64)
        self._ends = np.array([end], np.int64)
        self._returned: list[tuple[np.ndarray, np.ndarray]] = []
        self._waiting = 0  # runs in `_returned`
        self._memo: dict[int, int] = {}  # size -> no run before this index is as long
        self.total = end - start

    @property
    def largest(self) -> int:
        self._merge()
        return int((self._ends - self._starts).max(initial=0))

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends of all runs."""
        self._merge()
        return self._starts, self._ends

    def take(self, count: int) -> int | None:
        """First granule of a run of `count`, or None."""
        if count > self.total:
            return None
        if self._waiting > _SOME and (self._waiting > len(self._starts) // 10 or len(self._starts) < _FEW):
            self._merge()
        found = self._search(count)
        if found < 0 and self._waiting:
            self._merge()
            found = self._search(count)
        if found < 0:
            return None
        start = int(self._starts[found])
        self._starts[found] += count  # an empty run stays until the next merge
        self.total -= count
        return start

    def give(self, starts: np.ndarray, ends: np.ndarray) -> None:
        """Returns disjoint runs [starts, ends)."""
        if len(starts):
            self._returned.append((starts, ends))
            self._waiting += len(starts)
            self.total += int((ends - starts).sum())

    def _search(self, count: int) -> int:
        """Index of the first run of `count` or more; -1: none."""
        begin = max((at for size, at in self._memo.items() if size <= count), default=0)
        found = -1
        while begin < len(self._starts):
            fits = self._ends[begin : begin + _BLOCK] - self._starts[begin : begin + _BLOCK] >= count
            first = int(fits.argmax())
            if fits[first]:
                found = begin = begin + first
                break
            begin += _BLOCK
        if count not in self._memo and len(self._memo) >= _MEMOS:
            del self._memo[next(iter(self._memo))]
        self._memo[count] = begin
        return found

    def _merge(self) -> None:
        if not self._returned:
            return
        starts = np.concatenate([self._starts, *(s for s, _ in self._returned)])
        ends = np.concatenate([self._ends, *(e for _, e in self._returned)])
        some = starts < ends
        starts, ends = starts[some], ends[some]
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        apart = starts[1:] != ends[:-1]  # runs that touch become one
        self._starts = starts[np.concatenate(([True], apart))]
        self._ends = ends[np.concatenate((apart, [True]))]
        self._returned, self._waiting, self._memo = [], 0, {}
