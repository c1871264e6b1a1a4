"""The control plane of one node: which rows a task may have, who holds them, who waits for them.

A pure state machine: it knows no sockets, no payload and no clock (every verb takes `now`, seconds). Verbs answer at
once; a claim that must wait is parked and answered through `outcomes` by the call that satisfies it. Rows that leave
are listed in `departed`, for the warehouse to free their bytes.

Laws, each guaranteed here and nowhere else:
- a row is offered to a task exactly when all columns that the task reads are written and no worker of that task holds
  or has finished it; it is claimed at the grant, and offered again when the claim is released or its lease runs out;
- a row that is dropped or freed keeps its bytes until the last claim or pin on it ends, and is offered to nobody;
- no claim grants a row or group that is older than the claim's bounds: such rows are dropped as "stale";
- no verb looks at the rows alive, or at the waiting claims, that it does not concern;
- every effect on rows, but those of `put` and `commit` (the node knows their cells), goes through `journal` once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from mindspeed_asyncflow.dock.claims import Claims
from mindspeed_asyncflow.dock.columns import Schema, TaskSpec
from mindspeed_asyncflow.dock.partition import Partition
from mindspeed_asyncflow.dock.queue import CLAIMED, DONE, GONE, READY, WAITING, TaskQueue
from mindspeed_asyncflow.dock.table import (
    GENERATION_BITS,
    LAST_GENERATION,
    MAX_SLOTS,
    NUMBER_SHIFT,
    PARTITION_BITS,
)
from mindspeed_asyncflow.errors import DockError, StaleHandle


def _no_journal(kind: str, fields: dict) -> None:
    """Nothing is kept."""


class Controller(Claims):
    def __init__(self, schema: Schema, lease_s: float, pair: int = 0, first_claim: int = 1) -> None:
        super().__init__(schema, lease_s, pair, first_claim)
        self.journal: Callable[[str, dict], None] = _no_journal
        self.departed: list[tuple[Partition, np.ndarray, np.ndarray]] = []  # partition, row slots, group slots
        self.drops: Counter[str] = Counter()
        self.rows_written: Counter[str] = Counter()  # by column
        self._by_number: dict[int, Partition] = {}
        self._free_numbers: deque[tuple[int, int]] = deque()  # of closed partitions, and their next generation
        self._numbers = 0

    def set_pair(self, pair: int) -> None:
        """Before any row is put: handles and claim ids carry this number."""
        self.pair = pair
        self.leases.set_pair(pair)

    # -- partitions ------------------------------------------------------------------------------------------------

    def open(self, name: str, number: int | None = None, first: int = 1) -> Partition:
        """The partition `name`, made on first use. `number` and `first` generation are given after a restart."""
        part = self.partitions.get(name)
        if part is not None:
            return part
        if number is None:
            number, first = self._next_number()
            self.journal("open", {"partition": name, "number": number, "first": first})
        elif number in self._by_number:
            raise DockError(f"partition number {number} is taken by {self._by_number[number].name!r}")
        else:
            first = max([first, *(g for n, g in self._free_numbers if n == number)])
            self._free_numbers = deque((n, g) for n, g in self._free_numbers if n != number)
            self._free_numbers.extend((n, 1) for n in range(self._numbers, number))
            self._numbers = max(self._numbers, number + 1)
        part = Partition(name, number, list(self.schema.tasks), self.pair, first)
        self.partitions[name] = self._by_number[number] = part
        return part

    def partition_numbers(self) -> tuple[int, list[list[int]]]:
        """How many numbers were used, and those that are free with the first generation that no handle has named."""
        return self._numbers, [list(pair) for pair in self._free_numbers]

    def set_partition_numbers(self, used: int, free: Sequence[Sequence[int]]) -> None:
        self._numbers = used
        self._free_numbers = deque((number, first) for number, first in free)

    def _next_number(self) -> tuple[int, int]:
        if self._free_numbers:
            return self._free_numbers.popleft()
        if self._numbers >= 1 << PARTITION_BITS:
            raise DockError(f"a dock holds at most {1 << PARTITION_BITS} partitions at a time; close some first")
        self._numbers += 1
        return self._numbers - 1, 1

    def seal(self, name: str, now: float) -> None:
        """No more rows come. Groups that never became complete count as whole with the members that they have."""
        part = self.open(name)
        if part.closing:
            raise DockError(f"partition {name!r} is being closed")
        if not part.sealed:
            self.journal("seal", {"partition": name})
        part.sealed = True
        groups = part.groups.live()
        short = groups[part.groups.alive[groups] < part.groups.size[groups]]
        part.groups.size[short] = part.groups.alive[short]
        for task, queue in part.queues.items():
            queue.refresh(short)
            self.touched.add((name, task))
        self.wake(now)

    def close(self, name: str, now: float) -> None:
        """Frees all rows, those that are held when their claims end; the last one takes the partition with it."""
        part = self.partitions.get(name)
        if part is None:
            raise DockError(f"there is no partition {name!r} to close")
        if not part.closing:
            slots = np.flatnonzero(part.rows.alive & ~part.rows.doomed)
            self.journal("close", {"partition": name, "held": slots[part.rows.holders[slots] > 0]})
            part.closing = True
            self._leave(part, slots, None)
            self._forget_if_empty(part)
        self.wake(now)

    def _forget_if_empty(self, part: Partition) -> None:
        if part.closing and not part.rows.count and self.partitions.get(part.name) is part:
            del self.partitions[part.name], self._by_number[part.number]
            first = part.rows.next_generation()
            if first < LAST_GENERATION:  # a worn-out number is never used again
                self._free_numbers.append((part.number, first))
            self.teams.forget(part.name)

    # -- rows come -------------------------------------------------------------------------------------------------

    def check_put(
        self, name: str, ids: np.ndarray, sizes: np.ndarray, counts: np.ndarray, anonymous: bool = False
    ) -> Partition:  # fmt: skip
        """Raises DockError unless the groups can be put; changes nothing but the list of partitions.

        `anonymous`: the ids are distinct and each group is one row, so that only a group of the same id is to be found.
        """
        part = self.open(name)
        if part.sealed or part.closing:
            raise DockError(f"partition {name!r} is {'being closed' if part.closing else 'sealed'}: no row can be put")
        ids = np.asarray(ids, np.int64)
        keys = ids.tolist()
        if anonymous and part.groups.by_id.keys().isdisjoint(keys):
            part.rows.check_room(len(keys))
            return part
        sizes, counts = np.asarray(sizes, np.int64), np.asarray(counts, np.int64)
        if len(set(keys)) != len(keys):
            raise DockError("a put names the same group twice")
        part.rows.check_room(int(counts.sum()))
        limit, free = sizes, sizes
        if not part.groups.by_id.keys().isdisjoint(keys):
            groups = part.groups.lookup(ids)
            limit = np.where(groups < 0, sizes, part.groups.size[groups])
            free = limit - np.where(groups < 0, 0, part.groups.alive[groups])
        bad = (counts < 1) | (sizes < 1) | (sizes > MAX_SLOTS) | (counts > free)
        if np.count_nonzero(bad):
            at = int(np.argmax(bad))
            raise DockError(
                f"group {keys[at]} of {limit[at]} rows has {limit[at] - free[at]} rows already "
                f"and cannot take {counts[at]} more"
            )
        return part

    def put(
        self, part: Partition, ids: np.ndarray, sizes: np.ndarray, counts: np.ndarray, members: np.ndarray,
        ready: np.int64, tokens: np.ndarray, now: float, slots: np.ndarray | None = None,
        generations: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Adds counts[g] rows to group g, with the columns `ready` written. Returns row slots [n], group slots [g].

        `slots` and `generations` are given after a restart: rows get back the handles that they had.
        """
        ids, sizes, counts = np.asarray(ids, np.int64), np.asarray(sizes, np.int64), np.asarray(counts, np.int64)
        groups = part.groups.add(ids, sizes, counts)
        slots = part.rows.take(len(members), slots)
        if generations is not None:
            part.rows.generation[slots] = generations
        owners = groups if len(groups) == len(slots) else np.repeat(groups, counts)
        part.rows.add(slots, owners, members, ready, tokens, now)
        part.groups.attach(groups, counts, slots)
        mask = int(ready)
        self._note_columns(mask, len(slots))
        for task, queue in part.queues.items():
            need = int(self.schema.need[task])
            if mask & need == need:
                queue.enter(slots, READY)
                self.touched.add((part.name, task))
            else:
                queue.enter(slots)
        self.wake(now)
        return slots, groups

    def commit(
        self, part: Partition, slots: np.ndarray, written: np.int64, tokens: np.ndarray | None,
        versions: tuple[np.ndarray, np.ndarray] | None, now: float,
    ) -> None:  # fmt: skip
        """The bytes of columns `written` are in place for `slots` (unique): tasks that lack nothing now get them."""
        rows = part.rows
        after = rows.ready[slots] | written
        rows.ready[slots] = after
        if tokens is not None:
            rows.tokens[slots] += tokens
        if versions is not None:
            rows.note_versions(slots, *versions)
        mask = int(written)
        self._note_columns(mask, len(slots))
        for task, queue in part.queues.items():
            if queue.has_orders:
                queue.rekey(slots)
            need = self.schema.need[task]
            if mask & int(need):
                fresh = ((after & need) == need) & (queue.states(slots) == WAITING)
                count = np.count_nonzero(fresh)
                if count:
                    queue.offer(slots if count == len(slots) else slots[fresh])
                    self.touched.add((part.name, task))
        self.wake(now)

    def _note_columns(self, mask: int, rows: int) -> None:
        for name in self.schema.names(mask):
            self.rows_written[name] += rows

    def resolve(self, rows: np.ndarray, repeats: bool = False) -> tuple[Partition, np.ndarray]:
        """Slots of rows of one partition. Raises StaleHandle; DockError, unless `repeats`, for a row named twice."""
        numbers = rows >> NUMBER_SHIFT
        if not len(rows) or np.count_nonzero(numbers == numbers[0]) != len(rows):
            raise DockError("a call names rows of one partition, at least one")
        pair, number = divmod(int(numbers[0]), 1 << PARTITION_BITS)
        if pair != self.pair:
            raise DockError(f"these rows live on pair {pair}, this is pair {self.pair}")
        part = self._by_number.get(number)
        if part is None:
            if number >= self._numbers:
                raise DockError(f"no partition of this dock has the number {number}")
            raise StaleHandle(f"{len(rows)} of {len(rows)} row handles are stale: their partition was closed")
        slots = (rows >> GENERATION_BITS) & (MAX_SLOTS - 1)
        part.rows.check(rows, slots, rows & LAST_GENERATION)
        if not repeats and np.count_nonzero(part.rows.firsts(slots)) != len(slots):
            raise DockError("a call names the same row twice")
        return part, slots

    # -- tasks -----------------------------------------------------------------------------------------------------

    def add_task(self, spec: TaskSpec, now: float) -> None:
        """A new task: all live rows enter it, those that are ready at once, in issue order."""
        known = self.schema.tasks.get(spec.name)
        if known is not None and set(known.columns) != set(spec.columns):
            raise DockError(f"task {spec.name!r} reads {', '.join(known.columns)}, not {', '.join(spec.columns)}")
        if known is None:
            self.schema.add_task(spec)
            self.journal("task", {"name": spec.name, "columns": list(spec.columns)})
        need = self.schema.need[spec.name]
        for part in self.partitions.values():
            if spec.name not in part.queues:
                queue = part.queues[spec.name] = TaskQueue(part.rows, part.groups)
                slots = np.flatnonzero(part.rows.alive & ~part.rows.doomed)
                slots = slots[np.argsort(part.rows.seq[slots])]
                queue.enter(slots)
                queue.offer(slots[(part.rows.ready[slots] & need) == need])
                self.touched.add((part.name, spec.name))
        self.wake(now)

    def finish(self, part: Partition, task: str, slots: np.ndarray, now: float) -> None:
        """The task is done with these rows, which nobody has claimed: their state after a restart."""
        self.schema.task(task)
        queue = part.queues[task]
        states = queue.states(slots)
        if np.count_nonzero(states == CLAIMED):
            raise DockError(f"some of these rows are claimed by task {task!r}: their claims end with done")
        slots = slots[states != GONE]
        queue.settle(slots)
        self.note_done(part, task, slots)
        self.touched.add((part.name, task))
        self.wake(now)

    def reset(self, part: Partition, task: str, slots: np.ndarray, now: float) -> None:
        """Rows that the task has done are offered to it again."""
        self.schema.task(task)
        queue = part.queues[task]
        wrong = np.count_nonzero(queue.states(slots) != DONE)
        if wrong:
            raise DockError(f"{wrong} of these rows are not done by task {task!r}: they are offered already")
        self.journal("reset", {"partition": part.name, "task": task, "slots": slots})
        need = self.schema.need[task]
        ready = (part.rows.ready[slots] & need) == need
        queue.await_again(slots[~ready])
        queue.offer(slots[ready], DONE)
        self.touched.add((part.name, task))
        self.wake(now)

    # -- rows go ---------------------------------------------------------------------------------------------------

    def pin(self, part: Partition, slots: np.ndarray) -> None:
        """The bytes of these rows (repeats allowed) are being sent: they stay until `unpin`."""
        np.add.at(part.rows.holders, slots, 1)

    def unpin(self, part: Partition, slots: np.ndarray, now: float) -> None:
        np.subtract.at(part.rows.holders, slots, 1)
        if part.rows.doomed_count:
            free = slots[part.rows.doomed[slots] & (part.rows.holders[slots] == 0)]
            self._remove_doomed(part, free[part.rows.firsts(free)])
            self.wake(now)

    def drop(self, part: Partition, slots: np.ndarray, reason: str, now: float) -> None:
        """Rows leave all tasks; `reason` is counted. Their groups get smaller: the members that are left are whole."""
        slots = part.rows.lasting(slots)
        self.drops[reason] += len(slots)
        self._leave(part, slots, reason)
        self.wake(now)

    def free(self, part: Partition, slots: np.ndarray, now: float) -> None:
        """As `drop`, for rows that have served: nothing is counted."""
        self._leave(part, part.rows.lasting(slots), "")
        self.wake(now)

    def drop_stale(self, part: Partition, slots: np.ndarray) -> None:
        self.drops["stale"] += len(slots)
        self._leave(part, slots, "stale")

    def note_done(self, part: Partition, task: str, slots: np.ndarray) -> None:
        if len(slots):
            self.journal("done", {"partition": part.name, "task": task, "slots": slots})

    def note_spread(self, claim_id: int, is_open: bool) -> None:
        self.journal("spread", {"claim": claim_id, "is_open": is_open})

    def _leave(self, part: Partition, slots: np.ndarray, reason: str | None) -> None:
        """Out of every task that does not hold the rows now; gone where none does. `reason` None: see `close`."""
        if not len(slots):
            return
        rows = part.rows
        free = rows.holders[slots] == 0
        if reason is not None:
            about = {"partition": part.name, "reason": reason}
            self.journal("leave", about | {"slots": slots, "held": slots[~free]})
        rows.doom(slots)
        held = np.count_nonzero(free) != len(slots)
        for task, queue in part.queues.items():
            queue.leave(slots[queue.states(slots) != CLAIMED] if held else slots)
            self.touched.add((part.name, task))
        groups = part.groups.shrink(rows.group[slots])
        for queue in part.queues.values():
            queue.refresh(groups)
        self._remove(part, slots[free] if held else slots)

    def leave_doomed(self, part: Partition, task: str, slots: np.ndarray) -> None:
        """A claim on rows that are on their way out has ended."""
        part.queues[task].leave(slots)
        self._remove_doomed(part, slots[part.rows.holders[slots] == 0])

    def _remove_doomed(self, part: Partition, slots: np.ndarray) -> None:
        if len(slots):
            self.journal("gone", {"partition": part.name, "slots": slots})
            self._remove(part, slots)

    def _remove(self, part: Partition, slots: np.ndarray) -> None:
        if len(slots):
            groups = part.rows.group[slots]
            part.rows.remove(slots)
            gone = part.groups.detach(groups, part.rows.alive)
            self.departed.append((part, slots, gone))
            self._forget_if_empty(part)
