"""The pairs of a dock as one client sees them: who is there, which rows are whose, which room is where."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.columns import Schema
from mindspeed_asyncflow.dock.gather import weigh
from mindspeed_asyncflow.dock.homes import Room, named_home, spread
from mindspeed_asyncflow.dock.pair import PairClient
from mindspeed_asyncflow.dock.table import pair_numbers
from mindspeed_asyncflow.errors import DeadlineExceeded, DockError, WorkerLost


class Fleet:
    """See `DockClient`."""

    def __init__(
        self, addresses: str | Sequence[str], secret: str | bytes = b"", wait_s: float = 30.0,
        map_arena: bool = True, restart_s: float = 2.0, home: int | None = None,
    ) -> None:  # fmt: skip
        self.wait_s = wait_s
        self._connect = lambda address: PairClient(address, secret, wait_s, map_arena, restart_s)
        self._lock = threading.Lock()
        self._closed = False
        self._gone: set[int] = set()
        self._rooms: dict[int, Room] = {}  # by pair; filled at the first put
        listed = [addresses] if isinstance(addresses, str) else list(addresses)
        first = self._first(listed)
        if len(listed) > 1 and not first.addresses:
            first.close()
            self._join(listed)
            first = self._connect(listed[0])
        self.addresses: list[str] = first.addresses or [first.address]
        self._pairs: dict[int, PairClient] = {first.pair: first}
        self.schema: Schema = first.schema
        self._home = self._choose_home() if home is None else home

    @property
    def address(self) -> str:
        return ",".join(self.addresses)

    @property
    def mapped(self) -> bool:
        """Whether rows of the home pair are read as views into shared memory."""
        return self._pair(self._home).mapped

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pairs = list(self._pairs.values())
        for pair in pairs:
            pair.close()

    # -- pairs -----------------------------------------------------------------------------------------------------

    def _join(self, addresses: Sequence[str]) -> None:
        """Makes single pairs one dock; each must still be empty, or know the same list already."""
        for index, address in enumerate(addresses):
            pair = self._connect(address)
            try:
                pair.join(index, addresses)
            finally:
                pair.close()

    def _first(self, listed: Sequence[str]) -> PairClient:
        for address in listed[:-1]:
            try:
                return self._connect(address)
            except WorkerLost:
                continue
        return self._connect(listed[-1])

    def _choose_home(self) -> int:
        if len(self.addresses) == 1:
            return 0
        mapped = [i for i in range(len(self.addresses)) if self._reachable(i) and self._pair(i).mapped]
        return secrets.choice(mapped or list(self._pairs))

    def _reachable(self, number: int) -> bool:
        try:
            self._pair(number)
        except WorkerLost:
            return False
        return True

    def _pair(self, number: int) -> PairClient:
        with self._lock:
            if self._closed:
                raise DockError("this dock client is closed")
            if number in self._gone or not 0 <= number < len(self.addresses):
                raise WorkerLost(f"pair {number} of this dock was lost and forgotten, or never existed")
            pair = self._pairs.get(number)
        if pair is None:
            pair = self._connect(self.addresses[number])
            with self._lock:
                kept = self._pairs.setdefault(number, pair)
            if kept is not pair:
                pair.close()
            pair = kept
        return pair

    def _alive(self) -> list[int]:
        return [i for i in range(len(self.addresses)) if i not in self._gone]

    def pairs(self) -> Iterator[PairClient]:
        """All pairs that are not lost."""
        return (self._pair(number) for number in self._alive())

    def _by_pair(self, rows: np.ndarray) -> Iterator[tuple[PairClient, np.ndarray]]:
        """The pairs that hold `rows` and the positions of theirs."""
        rows = np.asarray(rows, np.int64)
        if not len(rows):
            return
        numbers = pair_numbers(rows)
        if bool((numbers == numbers[0]).all()):
            yield self._pair(int(numbers[0])), np.arange(len(rows))
            return
        for number in np.unique(numbers).tolist():
            yield self._pair(number), np.flatnonzero(numbers == number)

    # -- homes of groups -------------------------------------------------------------------------------------------

    def _homes(
        self, partition: str, groups: tuple[np.ndarray, ...] | None, counts: np.ndarray, values: Mapping[str, Any]
    ) -> np.ndarray:
        """The pair of each group, int64 [groups]. `groups`: ids, sizes, counts, members."""
        alive = self._alive()
        for number in alive:
            if number not in self._rooms:
                self._note_room(number)
        homes = np.array(alive)[spread(weigh(self.schema, values, counts), counts, [self._rooms[n] for n in alive])]
        if groups is not None:
            ids, sizes, *_ = groups
            for i in np.flatnonzero(counts < sizes).tolist():
                homes[i] = named_home(partition, int(ids[i]), alive)
        return homes

    def _put_at(
        self, home: int, movable: bool, timeout_s: float | None, put: Callable[[PairClient, float | None], list]
    ) -> list[np.ndarray]:
        """`put` at `home`, or at once elsewhere when that one is full, or at `home` once it has room."""
        others = [n for n in self._alive() if n != home] if movable else []
        for number in [home, *others] if others else []:
            try:
                handles = put(self._pair(number), 0.0)
            except DeadlineExceeded:
                continue
            self._note_room(number)
            return handles
        handles = put(self._pair(home), timeout_s)
        self._note_room(home)
        return handles

    def _note_room(self, number: int) -> None:
        pair = self._pair(number)
        self._rooms[number] = Room(pair.arena_bytes, pair.free_bytes, pair.live_rows)
