"""The rows of one partition as one task sees them: waiting -> ready -> claimed -> done.

`offer` is the only way into `ready` and `take` the only way out of it towards a claim. Counts per group and the set of
whole groups are kept up to date by both, so that no question looks at the rows alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from mindspeed_asyncflow.dock.table import GroupTable, Parallel, RowTable

GONE, WAITING, READY, CLAIMED, DONE = range(5)
STATE_NAMES = ("gone", "waiting", "ready", "claimed", "done")
_Live = Callable[[np.ndarray], np.ndarray]
_SLACK = 1024  # outdated entries that a line may hold before it is cleaned


class _Line:
    """First-in first-out line of numbers, removed lazily: an entry counts while it is its number's newest."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self._ticket = np.zeros(0, np.int64)
        self._next = 1
        self._length = 0

    def add(self, numbers: np.ndarray, front: bool = False) -> None:
        top = int(numbers.max()) + 1
        if top > len(self._ticket):
            self._ticket = np.concatenate((self._ticket, np.zeros(max(top, 256), np.int64)))
        tickets = np.arange(self._next, self._next + len(numbers))
        self._next += len(numbers)
        self._ticket[numbers] = tickets
        if front:
            self._chunks.appendleft((numbers, tickets))
        else:
            self._chunks.append((numbers, tickets))
        self._length += len(numbers)

    def peek(self, count: int, live: _Live) -> np.ndarray:
        """The first `count` numbers for which `live` holds; outdated entries before them leave the line."""
        found: list[np.ndarray] = []
        while count > 0 and self._chunks:
            numbers, tickets = self._chunks.popleft()
            if len(numbers) > count:
                self._chunks.appendleft((numbers[count:], tickets[count:]))
                numbers, tickets = numbers[:count], tickets[:count]
            self._length -= len(numbers)
            valid = live(numbers) & (self._ticket[numbers] == tickets)
            found.append(numbers[valid])
            count -= len(found[-1])
        numbers = np.concatenate(found) if found else np.empty(0, np.int64)
        if len(numbers):
            self.add(numbers, front=True)
        return numbers

    def clean(self, live: _Live, alive: int) -> None:
        """Forgets outdated entries once they outnumber the `alive` ones."""
        if self._length > 2 * alive + _SLACK:
            numbers = np.concatenate([n for n, _ in self._chunks])
            tickets = np.concatenate([t for _, t in self._chunks])
            valid = live(numbers) & (self._ticket[numbers] == tickets)
            self._chunks = deque([(numbers[valid], tickets[valid])])
            self._length = int(valid.sum())


class _RowStates(Parallel):
    state: np.ndarray  # int8
    claim: np.ndarray  # int64: the claim that holds the row, 0 when none


class _GroupStates(Parallel):
    ready: np.ndarray  # int32: rows of the group in state READY
    whole: np.ndarray  # bool: all of them are


class TaskQueue:
    def __init__(self, rows: RowTable, groups: GroupTable) -> None:
        self._rows, self._groups = rows, groups
        self._r = _RowStates(state=("int8", GONE), claim=("int64", 0))
        self._g = _GroupStates(ready=("int32", 0), whole=("bool", 0))
        self._row_line, self._group_line = _Line(), _Line()
        self._cursor = 0  # no group before this place in issue order is still to be granted
        self.counts = np.zeros(5, np.int64)  # rows by state; GONE is not kept
        self.whole_groups = 0

    @property
    def ready_rows(self) -> int:
        return int(self.counts[READY])

    def states(self, slots: np.ndarray) -> np.ndarray:
        return self._r.state[slots]

    def holder(self, slots: np.ndarray) -> np.ndarray:
        return self._r.claim[slots]

    def enter(self, slots: np.ndarray) -> None:
        """New rows."""
        self._r.ensure(self._rows.capacity)
        self._g.ensure(self._groups.capacity)
        self._r.state[slots] = WAITING
        self.counts[WAITING] += len(slots)
        if len(slots):
            self._cursor = min(self._cursor, int(self._groups.seq[self._rows.group[slots]].min()))

    def offer(self, slots: np.ndarray, front: bool = False) -> None:
        """Rows become ready, or are offered again (`front`: before the others)."""
        if not len(slots):
            return
        self._move(slots, READY)
        self._r.claim[slots] = 0
        self._row_line.add(slots, front)
        groups = self._rows.group[slots]
        np.add.at(self._g.ready, groups, 1)
        self.refresh(np.unique(groups), front)
        self._row_line.clean(self._is_ready, self.ready_rows)
        self._group_line.clean(self.whole, self.whole_groups)

    def take(self, slots: np.ndarray, claim: int) -> None:
        """Ready rows are claimed."""
        self._leave_ready(slots)
        self._move(slots, CLAIMED)
        self._r.claim[slots] = claim

    def finish(self, slots: np.ndarray) -> None:
        self._move(slots, DONE)
        self._r.claim[slots] = 0

    def leave(self, slots: np.ndarray) -> None:
        """Rows leave the task whatever their state is."""
        self._leave_ready(slots[self._r.state[slots] == READY])
        self._move(slots, GONE)
        self._r.claim[slots] = 0

    def refresh(self, groups: np.ndarray, front: bool = False) -> None:
        """Looks again whether `groups` (unique) are whole: after a change of their rows or of their size."""
        size = self._groups.size[groups]
        now = (self._g.ready[groups] == size) & (size > 0)
        before = self._g.whole[groups]
        self._g.whole[groups] = now
        self.whole_groups += int(now.sum()) - int(before.sum())
        new = groups[now & ~before]
        if len(new):
            self._group_line.add(new[np.argsort(self._groups.seq[new])], front)
        if front and len(groups):
            self._cursor = min(self._cursor, int(self._groups.seq[groups].min()))

    def first_rows(self, count: int) -> np.ndarray:
        return self._row_line.peek(count, self._is_ready)

    def first_groups(self, count: int) -> np.ndarray:
        return self._group_line.peek(count, self.whole)

    def next_groups(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next `count` groups in issue order of which a row is still to be granted, and whether each is whole."""
        found: list[int] = []
        seq = self._cursor
        while len(found) < count and seq < self._groups.next_seq:
            group = self._groups.by_seq.get(seq)
            if group is not None and bool((self._r.state[self._groups.rows[group]] <= READY).any()):
                found.append(group)
            elif not found:
                self._cursor = seq + 1
            seq += 1
        groups = np.array(found, np.int64)
        return groups, self._g.whole[groups]

    def whole(self, groups: np.ndarray) -> np.ndarray:
        return self._g.whole[groups]

    def _is_ready(self, slots: np.ndarray) -> np.ndarray:
        return self._r.state[slots] == READY

    def _leave_ready(self, slots: np.ndarray) -> None:
        if len(slots):
            groups = self._rows.group[slots]
            np.subtract.at(self._g.ready, groups, 1)
            self.refresh(np.unique(groups))

    def _move(self, slots: np.ndarray, state: int) -> None:
        self.counts -= np.bincount(self._r.state[slots], minlength=5)
        self._r.state[slots] = state
        self.counts[state] += len(slots)
