"""Numbers (rows or groups that are ready) in the order in which they are to be granted.

Entries leave lazily: a number's newest entry counts, until the number is removed. Both kinds of line do work only on
what is added, removed or looked at; outdated entries are cleaned once they outnumber the others.
"""

from __future__ import annotations

import numpy as np

from mindspeed_asyncflow.dock.table import enlarge

_SLACK = 1024  # outdated entries that a line may hold before it is cleaned
_OUT = int(np.iinfo(np.int64).min)


class ArrivalLine:
    """First come, first served; those that are offered again may go to the front.

    An entry's ticket is its place in the buffer: it counts while it is its number's ticket.
    """

    def __init__(self) -> None:
        self.tickets = np.empty(0, np.int64)
        self._entries = np.zeros(1024, np.int64)
        self._head = self._tail = 512
        self.count = 0
        self._shown: np.ndarray | None = None  # what `first` returned when it was the unbroken head of the line

    def ensure(self, numbers: int) -> None:
        enlarge(self.tickets, numbers, _OUT)

    def add(self, numbers: np.ndarray, front: bool = False) -> None:
        """`numbers` are distinct and below what `ensure` was told."""
        n = len(numbers)
        self._shown = None
        if (front and self._head < n) or (not front and self._tail + n > len(self._entries)):
            self._rebuild(n)
        if front:
            self._head -= n
            begin = self._head
        else:
            begin = self._tail
            self._tail += n
        self._entries[begin : begin + n] = numbers
        self.tickets[numbers] = np.arange(begin, begin + n)
        self.count += n
        if self._tail - self._head > 2 * self.count + _SLACK:
            self._rebuild(0)

    def remove(self, numbers: np.ndarray) -> None:
        """`numbers` are in the line, once each."""
        if numbers is self._shown:
            self._head += len(numbers)
        self._shown = None
        self.tickets[numbers] = _OUT
        self.count -= len(numbers)

    def first(self, count: int) -> np.ndarray:
        """The first `count` numbers, fewer when there are not so many. They stay in the line."""
        count = min(count, self.count)
        begin, found, total, width = self._head, [], 0, count
        while total < count:
            end = min(begin + width, self._tail)
            numbers = self._entries[begin:end]
            good = self.tickets[numbers] == np.arange(begin, end)
            valid = int(np.count_nonzero(good))
            if valid == count == end - self._head:
                self._shown = numbers.copy()
                return self._shown
            if not valid and not total:
                self._head = end  # outdated entries at the head are never looked at again
            found.append(numbers[good])
            total += valid
            begin, width = end, 2 * width
        return np.concatenate(found)[:count] if found else np.empty(0, np.int64)

    def all(self) -> np.ndarray:
        """All numbers in order. Looks at all entries."""
        numbers = self._entries[self._head : self._tail]
        return numbers[self.tickets[numbers] == np.arange(self._head, self._tail)]

    def _rebuild(self, room: int) -> None:
        """Forgets outdated entries and makes room for `room` more at both ends; tickets keep their order."""
        numbers = self.all()
        size = max(1024, 4 * (len(numbers) + room))
        entries = np.zeros(size, np.int64)
        begin = (size - len(numbers)) // 2
        entries[begin : begin + len(numbers)] = numbers
        self._entries, self._head, self._tail = entries, begin, begin + len(numbers)
        self.tickets[numbers] = np.arange(begin, self._tail)


class KeyLine:
    """Lowest key first, equal keys in the order in which they came.

    Sorted runs, each at least twice as long as the next: an entry is merged about log2(n) times, and a look takes the
    heads of about log2(n) runs.
    """

    def __init__(self) -> None:
        self._tickets = np.empty(0, np.int64)
        self._next = 0
        self._runs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # keys, numbers, tickets
        self.count = 0
        self._length = 0

    def ensure(self, numbers: int) -> None:
        enlarge(self._tickets, numbers, _OUT)

    def add(self, numbers: np.ndarray, keys: np.ndarray) -> None:
        """`numbers` are distinct; those that are in the line already move to their new place."""
        self.count += int(np.count_nonzero(self._tickets[numbers] == _OUT))
        tickets = np.arange(self._next, self._next + len(numbers))
        self._next += len(numbers)
        self._tickets[numbers] = tickets
        order = np.argsort(keys, kind="stable")
        self._runs.append((keys[order], numbers[order], tickets[order]))
        self._length += len(numbers)
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            self._merge(2)
        if self._length > 2 * self.count + _SLACK:
            self._merge(len(self._runs))

    def remove(self, numbers: np.ndarray) -> None:
        """`numbers` are in the line, once each."""
        self._tickets[numbers] = _OUT
        self.count -= len(numbers)

    def first(self, count: int) -> np.ndarray:
        """The first `count` numbers, fewer when there are not so many. They stay in the line."""
        heads = []
        for place, run in enumerate(self._runs):
            keys, numbers, tickets = run
            begin = total = 0
            while total < count and begin < len(keys):
                end = begin + count - total
                good = self._tickets[numbers[begin:end]] == tickets[begin:end]
                valid = int(np.count_nonzero(good))
                if valid:
                    heads.append((keys[begin:end][good], numbers[begin:end][good]))
                    total += valid
                elif not total:  # outdated entries at the head of a run are never looked at again
                    self._runs[place] = (keys[end:], numbers[end:], tickets[end:])
                    self._length -= min(end, len(keys)) - begin
                    keys, numbers, tickets = self._runs[place]
                    continue
                begin = end
        self._runs = [run for run in self._runs if len(run[0])]
        if not heads:
            return np.empty(0, np.int64)
        if len(heads) == 1:
            return heads[0][1]
        order = np.argsort(np.concatenate([k for k, _ in heads]), kind="stable")[:count]
        return np.concatenate([n for _, n in heads])[order]

    def _merge(self, runs: int) -> None:
        """The newest `runs` runs become one, without outdated entries."""
        keys, numbers, tickets = (np.concatenate(parts) for parts in zip(*self._runs[-runs:]))
        good = self._tickets[numbers] == tickets
        keys, numbers, tickets = keys[good], numbers[good], tickets[good]
        order = np.argsort(keys, kind="stable")
        del self._runs[-runs:]
        self._length -= len(good) - len(order)
        self._runs.append((keys[order], numbers[order], tickets[order]))
