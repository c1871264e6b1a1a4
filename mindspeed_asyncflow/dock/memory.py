"""What of a pair outlives its process: the journal, answers that may be asked for again, bytes nobody may have yet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np

from mindspeed_asyncflow.dock.answers import Answers
from mindspeed_asyncflow.dock.arena import Arena
from mindspeed_asyncflow.dock.columns import column_table
from mindspeed_asyncflow.dock.effects import describe_state
from mindspeed_asyncflow.dock.journal import Effect, Journal, read_journal
from mindspeed_asyncflow.dock.node import MOST_ROWS, DockNode
from mindspeed_asyncflow.dock.peers import Peers
from mindspeed_asyncflow.dock.rebuild import Rebuild
from mindspeed_asyncflow.dock.wire import Message
from mindspeed_asyncflow.errors import DockMemoryLost, PlatformError

_ROW_BYTES, _CELL_BYTES, _CALL_BYTES = 192, 32, 1 << 16  # most that a row, a cell and a call add to the journal
_BOOT_SHIFT = 32  # claim ids, reservations and groups without a name: the number of the start, then a counter

_BOOTS_OF_LIFE, _PARTITIONS_OF_LIFE = 256, 32

_BYTE = np.dtype(np.uint8)


class Memory:
    """`boot` counts the starts of the pair from 0; `first_number` is one that no earlier start has used. `life`: of a
    pair that begins empty, how often it has lost its memory before; no number of an earlier life comes again."""

    def __init__(self, arena: Arena, restart: bool, life: int = 0) -> None:
        path = journal_path(arena.path)
        self._effects = list(read_journal(path, arena.token)) if restart else []
        boots = (fields["number"] for kind, fields in self._effects if kind == "boot")
        self.boot = 1 + max(boots, default=life * _BOOTS_OF_LIFE - 1)
        self.first_number = (self.boot << _BOOT_SHIFT) + 1
        self.journal = Journal(path, arena.token)
        self.answers = Answers()
        self._quarantine: list[tuple[float, int, np.ndarray]] = []  # reservations of earlier starts, whose clients may
        # still be writing: until when, number, begins and ends

    @property
    def life(self) -> int:
        return self.boot // _BOOTS_OF_LIFE

    def start(self, node: DockNode, peers: Peers, now: float, lease_s: float) -> None:
        """Brings node and peers to where the journal ends, and from there notes what they do."""
        self._node, self._peers = node, peers
        if self._effects:
            self._rebuild(now, lease_s)
        else:  # handles name the number of their partition: those of earlier lives are stale
            node.controller.set_partition_numbers(self.life * _PARTITIONS_OF_LIFE, [])
        self.journal.start(self._description())
        node.set_journal(self.journal.note)
        node.before = lambda message: self.journal.ensure_room(self._needs(message))

    def tick(self, now: float) -> None:
        while self._quarantine and self._quarantine[0][0] <= now:
            _, number, spans = self._quarantine.pop(0)
            self.journal.note("unreserve", {"number": number})
            self._node.warehouse.give(spans)
            self._node.room_made(now)

    def next_deadline(self) -> float | None:
        return self._quarantine[0][0] if self._quarantine else None

    def compact(self) -> None:
        """Replaces a journal that has grown far beyond the state that it leads to."""
        if self.journal.outgrown:
            try:
                self.journal.start(self._description())
            except PlatformError:  # no memory for two at a time: the long one goes on
                self.journal.postpone()

    def _description(self) -> Iterator[Effect]:
        node, peers = self._node, self._peers
        yield "boot", {"number": self.boot, "columns": column_table(node.schema)}
        if peers.addresses:
            yield "join", {"index": peers.index, "addresses": peers.addresses}
        for number in peers.forgotten:
            yield "forget_pair", {"number": number}
        yield from describe_state(node.controller, node.warehouse)
        for number, spans in node.store.reserved_spans().items():
            yield "reserve", {"number": number, "spans": spans}
        for _, number, spans in self._quarantine:
            yield "reserve", {"number": number, "spans": spans.reshape(-1)}
        for (client, request), frame in self.answers:
            yield "answer", {"client": client, "request": request, "frame": frame}

    def _rebuild(self, now: float, lease_s: float) -> None:
        state = Rebuild(self._node.controller, self._node.warehouse, now, self._node.set_pair)
        state.run(self._effects)
        self._effects = []
        for identity, frame in state.answers.items():
            self.answers.keep(identity, frame)
        if state.joined:
            self._peers.join(**state.joined)
        for number in state.forgotten:
            self._peers.forget(number)
        self._quarantine = [(now + lease_s, n, spans) for n, spans in state.reserved.items() if len(spans)]

    def _needs(self, message: Message) -> int:
        """At most so many bytes does a call add to the journal."""
        rows = 0
        for value in message.values():
            if type(value) is np.ndarray and len(value) > rows and value.dtype != _BYTE:
                rows = len(value)
        if isinstance(count := message.get("count"), int):
            rows = max(rows, min(count, MOST_ROWS))
        return rows * (_ROW_BYTES + _CELL_BYTES * len(self._node.warehouse.parts)) + _CALL_BYTES


def journal_path(arena_path: str) -> str:
    return f"{arena_path}.journal"


def can_restart(arena_path: str) -> bool:
    return os.path.exists(arena_path) and os.path.exists(journal_path(arena_path))


@contextlib.contextmanager
def damage_named(arena_path: str) -> Iterator[None]:
    """Around a restart: whatever it trips over was read from the memory that a dead pair has left."""
    try:
        yield
    except Exception as error:  # boundary: damaged bytes may raise anything
        raise DockMemoryLost(f"{arena_path} or its journal is damaged: {type(error).__name__}: {error}") from error
