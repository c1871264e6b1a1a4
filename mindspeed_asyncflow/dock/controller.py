"""The control plane of one node: which rows a task may have, who holds them, who waits for them.

A pure state machine: it knows no sockets, no payload and no clock (every verb takes `now`, seconds). Verbs answer at
once; a claim that must wait is parked and answered through `outcomes` by the call that satisfies it. Rows that leave
are listed in `departed`, for the warehouse to free their bytes.

Laws, each guaranteed here and nowhere else:
- a row is offered to a task exactly when all columns that the task reads are written and no worker of that task holds
  or has finished it; it is claimed at the grant, and offered again when the claim is released or its lease runs out;
- a row that is dropped or freed keeps its bytes until the last claim on it ends, and is offered to nobody;
- no claim grants a row or group that is older than the claim's `min_version`: such rows are dropped as "stale".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from mindspeed_asyncflow.dock import report
from mindspeed_asyncflow.dock.columns import Schema
from mindspeed_asyncflow.dock.leases import LeaseBook, OpenClaim
from mindspeed_asyncflow.dock.partition import ClaimRequest, Dropped, Grant, Partition
from mindspeed_asyncflow.dock.policies import pick
from mindspeed_asyncflow.dock.queue import CLAIMED, WAITING, TaskQueue
from mindspeed_asyncflow.dock.table import MAX_SLOTS, PARTITION_BITS, unpack_handles
from mindspeed_asyncflow.errors import AsyncFlowError, DockError


class Controller:
    def __init__(self, schema: Schema, lease_s: float, pair: int = 0, first_claim: int = 1) -> None:
        self.schema = schema
        self.pair = pair
        self.leases = LeaseBook(lease_s, first_claim)
        self.partitions: dict[str, Partition] = {}
        self._by_number: dict[int, Partition] = {}
        self.waiting: dict[tuple[str, str], dict[object, ClaimRequest]] = {}
        self._touched: set[tuple[str, str]] = set()  # queues that may satisfy somebody now
        self.outcomes: list[tuple[object, Grant | AsyncFlowError]] = []
        self.departed: list[tuple[Partition, np.ndarray, np.ndarray]] = []  # partition, row slots, group slots
        self.drops: Counter[str] = Counter()

    # -- rows come ------------------------------------------------------------------------------------------------

    def open(self, name: str) -> Partition:
        """The partition `name`, made on first use."""
        if name not in self.partitions:
            if len(self.partitions) >= 1 << PARTITION_BITS:
                raise DockError("too many partitions")
            part = Partition(name, len(self.partitions), list(self.schema.tasks), self.pair)
            self.partitions[name] = self._by_number[part.number] = part
        return self.partitions[name]

    def check_put(self, name: str, ids: Sequence[int], sizes: Sequence[int], counts: Sequence[int]) -> Partition:
        """Raises DockError unless the groups can be put; changes nothing but the list of partitions."""
        part = self.open(name)
        if part.sealed:
            raise DockError(f"partition {name!r} is sealed: no more rows can be put")
        if len(set(ids)) != len(ids):
            raise DockError("a put names the same group twice")
        part.rows.check_room(sum(counts))
        for group, size, count in zip(ids, sizes, counts):
            slot = part.groups.by_id.get(group)
            there = int(part.groups.alive[slot]) if slot is not None else 0
            limit = int(part.groups.size[slot]) if slot is not None else size
            if count < 1 or not 0 < size <= MAX_SLOTS or there + count > limit:
                raise DockError(f"group {group} of {limit} rows has {there} rows already and cannot take {count} more")
        return part

    def put(
        self, part: Partition, ids: Sequence[int], sizes: Sequence[int], counts: np.ndarray,
        members: np.ndarray, ready: np.int64, tokens: np.ndarray, now: float,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Adds counts[g] rows to group g, with the columns `ready` written. Returns row slots [n], group slots [g]."""
        groups = part.groups.add(ids, sizes)
        slots = part.rows.add(np.repeat(groups, counts), members, ready, tokens)
        begin = 0
        for group, count in zip(groups.tolist(), counts.tolist()):
            part.groups.attach(group, slots[begin : begin + count])
            begin += count
        for task, queue in part.queues.items():
            queue.enter(slots)
            if ready & self.schema.need[task] == self.schema.need[task]:
                queue.offer(slots)
            self._touched.add((part.name, task))
        self._wake(now)
        return slots, groups

    def commit(
        self, part: Partition, slots: np.ndarray, written: np.int64, tokens: np.ndarray | None,
        versions: tuple[np.ndarray, np.ndarray] | None, now: float,
    ) -> None:  # fmt: skip
        """The bytes of columns `written` are in place for `slots` (unique): tasks that lack nothing now get them."""
        rows = part.rows
        before = rows.ready[slots]
        after = before | written
        rows.ready[slots] = after
        if tokens is not None:
            rows.tokens[slots] += tokens
        if versions is not None:
            rows.note_versions(slots, *versions)
        live = ~rows.doomed[slots]
        for task, queue in part.queues.items():
            need = self.schema.need[task]
            fresh = live & ((after & need) == need) & ((before & need) != need)
            if fresh.any():
                queue.offer(slots[fresh])
                self._touched.add((part.name, task))
        self._wake(now)

    def resolve(self, rows: np.ndarray, repeats: bool = False) -> tuple[Partition, np.ndarray]:
        """Slots of rows of one partition. Raises StaleHandle; DockError, unless `repeats`, for a row named twice."""
        pairs, numbers, slots, generations = unpack_handles(rows)
        part = self._by_number.get(int(numbers[0])) if len(rows) else None
        if part is None or not bool((numbers == numbers[0]).all()):
            raise DockError("a call names rows of one partition, at least one")
        part.rows.check(rows, slots, generations)
        if not repeats and len(set(slots.tolist())) != len(slots):
            raise DockError("a call names the same row twice")
        return part, slots

    # -- rows are given out ----------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest, now: float) -> Grant | None:
        """The grant, or None: then the request is parked and `outcomes` will hold its answer."""
        self.schema.task(request.task)
        pick(request.policy, request.unit, request.group_ids)
        if request.count < 1 or not 0 < request.at_least <= request.count:
            raise DockError(f"a claim needs 1 <= at_least <= count, got {request.at_least} and {request.count}")
        request.started = now
        grant = self._attempt(request, now)
        if grant is None:
            if request.deadline <= now:
                raise report.too_late(self, request, now)
            self.waiting.setdefault((request.partition, request.task), {})[request.key] = request
        self._wake(now)
        return grant

    def cancel(self, key: object) -> None:
        """Forgets a parked request whose asker is gone."""
        for parked in self.waiting.values():
            parked.pop(key, None)

    def _attempt(self, request: ClaimRequest, now: float) -> Grant | None:
        part = self.partitions.get(request.partition)
        if part is None:
            return None
        queue = part.queues[request.task]
        slots = self._choose(part, queue, request)
        over = self._is_tail(part, queue, request) and not len(slots)
        if not (len(slots) or over or request.dropped):
            return None
        claim_id = 0
        if len(slots):
            claim_id = self.leases.start(part.name, request.task, request.worker, slots, now).id
            queue.take(slots, claim_id)
            part.rows.holders[slots] += 1
        return part.grant(claim_id, slots, request.dropped, bool(over and not request.dropped))

    def _choose(self, part: Partition, queue: TaskQueue, request: ClaimRequest) -> np.ndarray:
        """Row slots for a claim, nothing when fewer than it needs are there. Drops what is too old on the way."""
        groups_wanted = request.unit == "groups"
        while True:
            ready = queue.whole_groups if groups_wanted else queue.ready_rows
            if not ready:
                return np.empty(0, np.int64)
            units = part.candidates(request)
            stale = part.stale(units, groups_wanted, request.min_version)
            if stale.any():
                request.dropped += self._drop_units(part, units[stale], groups_wanted, "stale")
                continue
            tail = request.dropped or self._is_tail(part, queue, request)
            if len(units) < request.at_least and not tail:
                return np.empty(0, np.int64)
            if groups_wanted and len(units):
                return part.members(units)
            return units

    def _is_tail(self, part: Partition, queue: TaskQueue, request: ClaimRequest) -> bool:
        """Whether nothing can become ready for this asker any more, except rows that it holds itself."""
        own = self.leases.held.get((request.partition, request.task, request.worker), 0)
        return part.sealed and int(queue.counts[WAITING] + queue.counts[CLAIMED]) == own

    # -- claims end ------------------------------------------------------------------------------------------------

    def held(
        self, claim_id: int, part: Partition | None, slots: np.ndarray | None, now: float
    ) -> tuple[OpenClaim, np.ndarray]:
        """The claim, its lease renewed, and those of its rows that are meant (None: all).

        Raises ClaimLost when the claim has ended, DockError when it does not hold a row.
        """
        claim = self.leases.get(claim_id, now)
        if slots is None:
            return claim, claim.slots
        holder = self.partitions[claim.partition].queues[claim.task].holder(slots)
        if part is not self.partitions[claim.partition] or not bool((holder == claim_id).all()):
            raise DockError(
                f"claim {claim_id} of task {claim.task!r} does not hold {int((holder != claim_id).sum())} of these rows"
            )
        return claim, slots

    def done(self, claim_id: int, part: Partition | None, slots: np.ndarray | None, now: float) -> None:
        """The task has finished these rows of the claim (None: all)."""
        claim, slots = self.held(claim_id, part, slots, now)
        self._end(claim, slots, "it is done", lambda queue, live: queue.finish(live))
        self._wake(now)

    def done_rows(self, part: Partition, task: str, slots: np.ndarray, now: float) -> None:
        """As `done`, for rows that any open claims of `task` hold."""
        self.schema.task(task)
        holders = part.queues[task].holder(slots)
        if not holders.all():
            raise DockError(f"{int((holders == 0).sum())} of these rows are not claimed by task {task!r}")
        for claim_id in np.unique(holders).tolist():
            self.done(claim_id, part, slots[holders == claim_id], now)

    def release(self, claim_id: int, part: Partition | None, slots: np.ndarray | None, now: float) -> None:
        """These rows of the claim (None: all) are offered again, before others."""
        claim, slots = self.held(claim_id, part, slots, now)
        self._give_back(claim, slots, "it was released")
        self._wake(now)

    def forget_worker(self, worker: str, now: float) -> int:
        """Takes back all claims of a lost worker; returns their number."""
        claims = self.leases.of_worker(worker)
        for claim in claims:
            self._give_back(claim, claim.slots, f"worker {worker!r} was forgotten")
        self._wake(now)
        return len(claims)

    def tick(self, now: float) -> None:
        """Ends leases and waits whose time has come."""
        for claim in self.leases.run_out(now):
            self._give_back(claim, claim.slots, f"its lease of {self.leases.lease_s:g} s ran out")
        self._wake(now)
        for parked in self.waiting.values():
            for key in [k for k, request in parked.items() if request.deadline <= now]:
                self.outcomes.append((key, report.too_late(self, parked.pop(key), now)))

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the earliest."""
        times = [request.deadline for parked in self.waiting.values() for request in parked.values()]
        lease = self.leases.next_deadline()
        return min(times + ([] if lease is None else [lease]), default=None)

    def _give_back(self, claim: OpenClaim, slots: np.ndarray, reason: str) -> None:
        self._end(claim, slots, reason, lambda queue, live: queue.offer(live, front=True))

    def _end(
        self, claim: OpenClaim, slots: np.ndarray, reason: str, then: Callable[[TaskQueue, np.ndarray], None]
    ) -> None:
        part = self.partitions[claim.partition]
        queue = part.queues[claim.task]
        self.leases.shorten(claim, slots, reason)
        part.rows.holders[slots] -= 1
        doomed = part.rows.doomed[slots]
        then(queue, slots[~doomed])
        self._touched.add((part.name, claim.task))
        if doomed.any():
            queue.leave(slots[doomed])
            self._remove(part, slots[doomed & (part.rows.holders[slots] == 0)])

    # -- rows go ---------------------------------------------------------------------------------------------------

    def drop(self, part: Partition, slots: np.ndarray, reason: str, now: float) -> None:
        """Rows leave all tasks; `reason` is counted. Their groups get smaller: the members that are left are whole."""
        slots = slots[~part.rows.doomed[slots]]
        self.drops[reason] += len(slots)
        self._leave(part, slots)
        self._wake(now)

    def free(self, part: Partition, slots: np.ndarray, now: float) -> None:
        """As `drop`, for rows that have served: nothing is counted."""
        self._leave(part, slots[~part.rows.doomed[slots]])
        self._wake(now)

    def seal(self, name: str, now: float) -> None:
        """No more rows come. Groups that never became complete count as whole with the members that they have."""
        part = self.open(name)
        part.sealed = True
        groups = np.fromiter(part.groups.rows, np.int64, len(part.groups.rows))
        short = groups[part.groups.alive[groups] < part.groups.size[groups]]
        part.groups.size[short] = part.groups.alive[short]
        for task, queue in part.queues.items():
            queue.refresh(short)
            self._touched.add((name, task))
        self._wake(now)

    def _drop_units(self, part: Partition, units: np.ndarray, groups: bool, reason: str) -> list[Dropped]:
        slots = part.members(units) if groups else units
        owner = part.rows.group[slots]
        report = [
            (int(part.groups.id[g]), part.handles(slots[owner == g]), reason) for g in dict.fromkeys(owner.tolist())
        ]
        self.drops[reason] += len(slots)
        self._leave(part, slots)
        return report

    def _leave(self, part: Partition, slots: np.ndarray) -> None:
        """Out of every task that does not hold the rows right now; gone where no task does."""
        if not len(slots):
            return
        held = part.rows.holders[slots] > 0
        for task, queue in part.queues.items():
            going = slots[~held | (queue.states(slots) != CLAIMED)]
            queue.leave(going)
            self._touched.add((part.name, task))
        groups = part.groups.shrink(part.rows.group[slots])
        for queue in part.queues.values():
            queue.refresh(groups)
        part.rows.doomed[slots[held]] = True
        self._remove(part, slots[~held])

    def _remove(self, part: Partition, slots: np.ndarray) -> None:
        if len(slots):
            groups = part.rows.group[slots]
            part.rows.remove(slots)
            gone = part.groups.detach(groups, part.rows.alive)
            self.departed.append((part, slots, gone))

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wake(self, now: float) -> None:
        """Answers parked requests of the queues that changed, oldest first."""
        while self._touched:
            parked = self.waiting.get(self._touched.pop())
            for key, request in list(parked.items()) if parked else ():
                grant = self._attempt(request, now)
                if grant is not None and parked is not None:
                    del parked[key]
                    self.outcomes.append((key, grant))
