"""The pairs of a dock as one client sees them: who is there, which rows are whose, which room is where."""

from __future__ import annotations

import functools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from mindspeed_asyncflow.dock import arguments
from mindspeed_asyncflow.dock.calls import Replaced
from mindspeed_asyncflow.dock.columns import Schema
from mindspeed_asyncflow.dock.gather import weigh
from mindspeed_asyncflow.dock.homes import Room, named_home, spread
from mindspeed_asyncflow.dock.pair import PairClient
from mindspeed_asyncflow.dock.table import pair_numbers
from mindspeed_asyncflow.errors import AsyncFlowError, DeadlineExceeded, DockError, Unanswered, WorkerLost

_T = TypeVar("_T")
_P = ParamSpec("_P")
_AGAIN_S = 0.05  # between two attempts to reach a pair
_Put = Callable[[PairClient, float], list]


def anew(verb: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """A verb of the whole dock, carried out again when a pair that it asked has lost its memory and begins empty."""

    @functools.wraps(verb)
    def call(dock: Any, *args: _P.args, **how: _P.kwargs) -> _T:
        for _ in dock.addresses:
            try:
                return verb(dock, *args, **how)
            except Replaced as replaced:
                dock._let_go(replaced.pair)
        return verb(dock, *args, **how)

    return call


_LOOK_ELSEWHERE_S = 0.25  # how long a put waits for room at its home before it looks at the others again


class Fleet:
    """See `DockClient`."""

    def __init__(
        self, addresses: str | Sequence[str], secret: str | bytes = b"", wait_s: float = 30.0,
        map_arena: bool = True, restart_s: float = 2.0, home: int | None = None,
    ) -> None:  # fmt: skip
        self.wait_s = wait_s
        self._connect = lambda address: PairClient(address, secret, wait_s, map_arena, restart_s)
        self._restart_s = restart_s
        self._lock = threading.Lock()
        self._closed = False
        self._rooms: dict[int, Room] = {}  # by pair; filled at the first put
        listed = [addresses] if isinstance(addresses, str) else list(addresses)
        first = self._first(listed)
        if len(listed) > 1 and not first.addresses:
            first.close()
            self._join(listed)
            first = self._connect(listed[0])
        self.addresses: list[str] = first.addresses or [first.address]
        self._pairs: dict[int, PairClient] = {first.pair: first}
        self._tokens = {first.pair: (first.token, first.life)}  # of pairs: and how often they have lost their memory
        self._gone: set[int] = set(first.forgotten)
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
        """One whose arena this process can map; else any, so that clients without a pair of their own spread out."""
        alive = self._alive()
        if len(alive) == 1:
            return alive[0]
        for local in (True, False):
            some = [n for n in alive if not local or _is_here(self.addresses[n])]
            for number in random.SystemRandom().sample(some, len(some)):
                if self._reachable(number) and (not local or self._pair(number).mapped):
                    return number
        return alive[0]

    def _reachable(self, number: int) -> bool:
        try:
            self._pair(number, patient=False)
        except WorkerLost:
            return False
        return True

    def _pair(self, number: int, patient: bool = True) -> PairClient:
        """Its client; `patient`: it may be starting again."""
        with self._lock:
            if self._closed:
                raise DockError("this dock client is closed")
            if number in self._gone or not 0 <= number < len(self.addresses):
                raise WorkerLost(f"pair {number} of this dock was lost and forgotten, or never existed")
            pair = self._pairs.get(number)
        if pair is None:
            pair = self._reach(number, time.monotonic() + (self._restart_s if patient else 0.0))
            token, life = self._tokens.get(number, (pair.token, pair.life))
            if token != pair.token and pair.life <= life:
                pair.close()
                raise WorkerLost(f"pair {number} at {pair.address} was replaced by another one; its rows are gone")
            with self._lock:
                self._tokens[number] = pair.token, pair.life
                kept = self._pairs.setdefault(number, pair)
            if kept is not pair:
                pair.close()
            pair = kept
        return pair

    def _reach(self, number: int, give_up: float) -> PairClient:
        while True:
            try:
                return self._connect(self.addresses[number])
            except WorkerLost as lost:
                if time.monotonic() >= give_up or self._closed:
                    raise WorkerLost(f"pair {number} of this dock cannot be reached: {lost}") from lost
            time.sleep(_AGAIN_S)

    def _alive(self) -> list[int]:
        return [i for i in range(len(self.addresses)) if i not in self._gone]

    def pairs(self) -> Iterator[PairClient]:
        """One after the other. Raises WorkerLost when one is gone and was not forgotten."""
        return (self._pair(number) for number in self._alive())

    def _ask_all(self, action: Callable[[PairClient], _T]) -> tuple[list[_T], list[AsyncFlowError]]:
        """What `action` gives at each pair, and the errors of those that refuse or are gone: all are asked."""
        found: list[_T] = []
        failed: list[AsyncFlowError] = []
        for number in self._alive():
            try:
                found.append(action(self._pair(number)))
            except WorkerLost as lost:
                self._let_go(number)
                if not self._was_forgotten(number):
                    failed.append(lost)
            except AsyncFlowError as error:
                failed.append(error)
        return found, failed

    def _everywhere(self, action: Callable[[PairClient], _T]) -> list[_T]:
        """`action` at all pairs; raises the first error when all were asked."""
        found, failed = self._ask_all(action)
        if failed:
            raise failed[0]
        return found

    def _was_forgotten(self, number: int) -> bool:
        """Whether somebody has told the dock that a pair that does not answer is lost for good."""
        for other in self._alive():
            if other != number:
                try:
                    pair = self._connect(self.addresses[other])
                except WorkerLost:
                    continue
                pair.close()
                for gone in pair.forgotten:
                    self._drop_pair(gone)
                break
        return number in self._gone

    def _drop_pair(self, number: int) -> None:
        self._gone.add(number)
        self._let_go(number)

    def _let_go(self, number: int) -> None:
        """The next call that needs this pair connects anew; calls under way go on trying."""
        with self._lock:
            self._pairs.pop(number, None)
        self._rooms.pop(number, None)

    def _by_pair(self, rows: np.ndarray) -> Iterator[tuple[PairClient, np.ndarray]]:
        """The pairs that hold `rows` and the positions of theirs."""
        rows = arguments.numbers("rows", rows)
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
        there = [number for number in alive if self._reachable(number)]
        if not there:
            raise WorkerLost(f"no pair of the dock at {self.address} can be reached")
        for number in there:
            if number not in self._rooms:
                self._note_room(number)
        rooms = [self._rooms[number] for number in there]
        homes = np.array(there)[spread(weigh(self.schema, values, counts), counts, rooms)]
        if groups is not None:
            ids, sizes, *_ = groups
            for i in np.flatnonzero(counts < sizes).tolist():
                homes[i] = named_home(partition, int(ids[i]), alive)
        return homes

    def _put_at(self, home: int, movable: bool, deadline: float, put: _Put) -> list[np.ndarray]:
        """`put` at `home`, or, where it may go elsewhere, at the first pair that has room for it."""
        while movable:
            for number in [home, *(n for n in list(self._rooms) if n != home)]:
                try:
                    return self._put_now(number, 0.0, put)
                except Unanswered:  # it may have been carried out, or will be
                    raise
                except DeadlineExceeded:
                    continue
            left = deadline - time.monotonic()
            if left <= _LOOK_ELSEWHERE_S or len(self._rooms) < 2:
                break
            try:
                return self._put_now(home, _LOOK_ELSEWHERE_S, put)
            except Unanswered:
                raise
            except DeadlineExceeded:
                continue
        return self._put_now(home, max(deadline - time.monotonic(), 0.0), put)

    def _put_now(self, number: int, timeout_s: float, put: _Put) -> list[np.ndarray]:
        try:
            handles = put(self._pair(number), timeout_s)
        except WorkerLost:
            self._let_go(number)  # whole groups go elsewhere until it can be reached again
            raise
        self._note_room(number)
        return handles

    def _note_room(self, number: int) -> None:
        pair = self._pair(number)
        self._rooms[number] = Room(pair.arena_bytes, pair.free_bytes, pair.live_rows)


def _is_here(address: str) -> bool:
    """Whether a host:port belongs to this node."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((host, 0))
    except OSError:
        return False
    return True
