"""A pair from the effects in its journal: what a restart does before it serves anybody.

What comes back: rows with their handles, cells, groups, versions, which tasks are done with what, sealed partitions,
tasks added at run time, and the answers to the newest calls. Claims do not: their rows are offered again, and a result
that still comes under an old claim is refused as late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.columns import TaskSpec, column_table
from mindspeed_asyncflow.dock.controller import Controller
from mindspeed_asyncflow.dock.journal import Effect
from mindspeed_asyncflow.dock.partition import Partition
from mindspeed_asyncflow.dock.queue import READY
from mindspeed_asyncflow.dock.warehouse import Warehouse, packed_offsets
from mindspeed_asyncflow.errors import DockError

KINDS = (
    "boot", "join", "forget_pair", "task", "numbers", "drops", "spread", "open", "partition", "put", "write", "cells",
    "done", "order", "reset", "leave", "gone", "seal", "close", "reserve", "unreserve", "answer",
)  # fmt: skip


class Rebuild:
    """Applies effects to an empty controller and warehouse. `answers`: (client, request) -> frame, oldest first.

    Rows that were dropped or freed while claims held them stay, as they did, until their claims ended; at the end all
    claims have ended.
    """

    def __init__(self, control: Controller, house: Warehouse, now: float, set_pair: Callable[[int], None]) -> None:
        self.control, self.house, self.now, self._set_pair = control, house, now, set_pair
        self.answers: dict[tuple[int, int], bytes] = {}
        self.reserved: dict[int, np.ndarray] = {}  # reservation -> begins and ends in bytes, [n, 2]
        self.joined: dict[str, Any] = {}
        self.forgotten: list[int] = []  # pairs
        self.boot = 0
        self._spread: dict[int, None] = {}  # claims over several pairs that held rows here

    def run(self, effects: Iterable[Effect]) -> None:
        """All of them. Afterwards the warehouse knows what is free."""
        self.control.frozen = True  # nobody is served from half a state
        for kind, fields in effects:
            if kind not in KINDS:
                raise DockError(f"the dock journal holds an effect {kind!r}, which this version does not know")
            getattr(self, f"_do_{kind}")(**fields)
        for part in list(self.control.partitions.values()):
            held = np.flatnonzero(part.rows.alive & (part.rows.holders > 0))
            if len(held):
                self.control.unpin(part, held, self.now)
        for claim_id in self._spread:
            self.control.leases.note_ended(claim_id, "its pair has started again since")
        self._settle()
        self.house.rebuild(list(self.reserved.values()))
        self.control.frozen = False

    def _settle(self) -> None:
        gone, self.control.departed = self.control.departed, []
        for part, slots, groups in gone:
            self.house.release_rows(part.number, slots, groups)

    def _adopt(
        self, part: Partition, parts: Sequence[tuple[str, bool]], cells: Mapping[str, Any], slots: np.ndarray
    ) -> None:  # fmt: skip
        for n, (name, shared) in enumerate(parts):
            if f"begin{n}" in cells:  # those of `slots`, back to back
                index, kind = slots, self.house.parts[name]
                lengths = np.ones(len(slots), np.int64) if kind.fixed else cells[f"lengths{n}"]
                offsets = packed_offsets(lengths, kind, cells[f"begin{n}"])
            else:
                index, offsets, lengths = cells[f"index{n}"], cells[f"offsets{n}"], cells[f"lengths{n}"]
                index = part.groups.lookup(index) if shared else index
            self.house.adopt(part.number, name, index, offsets, lengths)

    def _part(self, name: str) -> Partition:
        return self.control.partitions[name]

    # -- one method per kind of effect -----------------------------------------------------------------------------

    def _do_boot(self, number: int, columns: list[list]) -> None:
        if columns != column_table(self.control.schema):
            raise DockError("the dock journal was written for other columns; remove it and its arena to start afresh")
        self.boot = number

    def _do_join(self, index: int, addresses: list[str]) -> None:
        self.joined = {"index": index, "addresses": addresses}
        self._set_pair(index)

    def _do_forget_pair(self, number: int) -> None:
        self.forgotten.append(number)

    def _do_task(self, name: str, columns: list[str]) -> None:
        self.control.add_task(TaskSpec(name, tuple(columns)), self.now)

    def _do_drops(self, counts: dict[str, int]) -> None:
        self.control.drops.update(counts)

    def _do_numbers(self, used: int, free: list[list[int]]) -> None:
        self.control.set_partition_numbers(used, free)

    def _do_spread(self, claim: int, is_open: bool) -> None:
        self._spread.pop(claim, None)
        if is_open:
            self._spread[claim] = None

    def _do_open(self, partition: str, number: int, first: int) -> None:
        self.control.open(partition, number, first)

    def _do_partition(self, partition: str, number: int, first: int, generation: np.ndarray) -> None:
        part = self.control.open(partition, number, first)
        part.rows.ensure(len(generation))
        part.rows.generation[: len(generation)] = generation

    def _do_put(
        self, partition: str, slots: np.ndarray, generations: np.ndarray, ready: int, tokens: np.ndarray, born: float,
        first_id: int = 0, ids: np.ndarray | None = None, sizes: np.ndarray | None = None,
        counts: np.ndarray | None = None, members: np.ndarray | None = None,
        parts: Sequence[tuple[str, bool]] = (), born_each: np.ndarray | None = None,
        seq_each: np.ndarray | None = None, version_min: np.ndarray | None = None,
        version_max: np.ndarray | None = None, **cells: Any,
    ) -> None:  # fmt: skip
        part = self._part(partition)
        if ids is None or sizes is None or counts is None or members is None:  # each row is a group of its own
            ids = np.arange(first_id, first_id - len(slots), -1)
            sizes = counts = np.ones(len(slots), np.int64)
            members = np.zeros(len(slots), np.int32)
        mask, none = np.int64(ready), np.int64(0)
        at_once = mask if version_min is None or version_max is None else none
        self.control.put(part, ids, sizes, counts, members, at_once, tokens, born, slots, generations)
        if version_min is not None and version_max is not None:
            self.control.commit(part, slots, mask, None, (version_min, version_max), self.now)
        if born_each is not None and seq_each is not None:
            part.rows.born[slots], part.rows.seq[slots] = born_each, seq_each
            part.rows.next_seq = int(seq_each.max(initial=-1)) + 1
        self._adopt(part, parts, cells, slots)

    def _do_write(
        self, partition: str, slots: np.ndarray, written: int, tokens: np.ndarray, version_min: np.ndarray,
        version_max: np.ndarray, parts: Sequence[tuple[str, bool]] = (), **cells: Any,
    ) -> None:  # fmt: skip
        part = self._part(partition)
        self._adopt(part, parts, cells, slots)
        self.control.commit(part, slots, np.int64(written), None, None, self.now)
        part.rows.tokens[slots], part.rows.version_min[slots], part.rows.version_max[slots] = (
            tokens, version_min, version_max,
        )  # fmt: skip

    def _do_cells(self, partition: str, parts: Sequence[tuple[str, bool]], **cells: Any) -> None:
        self._adopt(self._part(partition), parts, cells, np.empty(0, np.int64))

    def _do_done(self, partition: str, task: str, slots: np.ndarray) -> None:
        self.control.finish(self._part(partition), task, slots, self.now)

    def _do_order(self, partition: str, task: str, slots: np.ndarray) -> None:
        queue = self._part(partition).queues[task]
        queue.arrange(slots[queue.states(slots) == READY])

    def _do_reset(self, partition: str, task: str, slots: np.ndarray) -> None:
        self.control.reset(self._part(partition), task, slots, self.now)

    def _do_leave(self, partition: str, slots: np.ndarray, held: np.ndarray, reason: str) -> None:
        part = self._part(partition)
        self.control.pin(part, held)
        if reason:
            self.control.drop(part, slots, reason, self.now)
        else:
            self.control.free(part, slots, self.now)
        self._settle()

    def _do_gone(self, partition: str, slots: np.ndarray) -> None:
        self.control.unpin(self._part(partition), slots, self.now)
        self._settle()

    def _do_seal(self, partition: str) -> None:
        self.control.seal(partition, self.now)

    def _do_close(self, partition: str, held: np.ndarray) -> None:
        self.control.pin(self._part(partition), held)
        self.control.close(partition, self.now)
        self._settle()

    def _do_reserve(self, number: int, spans: np.ndarray | Sequence[int]) -> None:
        self.reserved[number] = np.array(spans, np.int64).reshape(-1, 2)

    def _do_unreserve(self, number: int) -> None:
        self.reserved.pop(number, None)

    def _do_answer(self, client: int, request: int, frame: bytes) -> None:
        self.answers[(client, request)] = frame
