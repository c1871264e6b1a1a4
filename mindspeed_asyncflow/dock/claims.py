"""Claims from their request to their end: the half of the controller that gives rows out. See `controller`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from mindspeed_asyncflow.dock import report
from mindspeed_asyncflow.dock.columns import Schema
from mindspeed_asyncflow.dock.leases import PAIR_SHIFT, SPREAD_CLAIM, LeaseBook, OpenClaim
from mindspeed_asyncflow.dock.partition import ClaimRequest, Dropped, Grant, Partition
from mindspeed_asyncflow.dock.policies import Policy, pick
from mindspeed_asyncflow.dock.queue import CLAIMED, WAITING, TaskQueue
from mindspeed_asyncflow.dock.teams import TeamKey, Teams, divide, part_of, team_key
from mindspeed_asyncflow.dock.waking import Waking
from mindspeed_asyncflow.errors import DockError

_NOTHING = np.empty(0, np.int64)
_DONE, _RELEASED = "it is done", "it was released"


class Claims(Waking):
    def __init__(self, schema: Schema, lease_s: float, pair: int, first_claim: int) -> None:
        super().__init__(LeaseBook(lease_s, first_claim, pair))
        self.schema = schema
        self.pair = pair
        self.teams = Teams(lease_s, self._takeable, self._lease_end)
        self.ends: list[object] = []  # parked requests with `hold_end` for which the stream has ended here
        self.counters: dict[str, report.TaskCounters] = {}

    @abstractmethod
    def drop_stale(self, part: Partition, slots: np.ndarray) -> None:
        """These rows are older than a claim allows."""

    @abstractmethod
    def leave_doomed(self, part: Partition, task: str, slots: np.ndarray) -> None:
        """A claim has ended on rows that were freed meanwhile."""

    @abstractmethod
    def note_done(self, part: Partition, task: str, slots: np.ndarray) -> None:
        """For the journal."""

    @abstractmethod
    def note_spread(self, claim_id: int, is_open: bool) -> None:
        """For the journal: a claim over several pairs has rows here, or its client has ended it here."""

    # -- rows are given out ----------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest, now: float) -> Grant | None:
        """The grant, or None: then the request is parked and `outcomes` will hold its answer."""
        self.schema.task(request.task)
        policy = pick(request.policy, request.unit, request.group_ids)
        if request.count < 1 or not 0 < request.at_least <= request.count:
            raise DockError(f"a claim needs 1 <= at_least <= count, got {request.at_least} and {request.count}")
        if request.team:
            self.teams.check(request)
        request.started = self.now = now
        grant = None if self._frozen_at is not None else self._attempt(request, policy, now)
        if grant is None:
            if request.deadline <= now:
                raise report.too_late(self, request, now)
            self.waiting.park(request)
            if request.team:
                self.teams.park(request)
            if self._frozen_at is not None:
                self.touched.add((request.partition, request.task))
        self.wake(now)
        return grant

    def cancel(self, key: object) -> None:
        """Forgets a parked request whose asker is gone."""
        request = self.waiting.remove(key)
        if request is not None and request.team:
            self.teams.unpark(request)

    def _attempt(self, request: ClaimRequest, policy: Policy, now: float) -> Grant | None:
        if request.team and (share := self.teams.take(request)) is not None:
            return self._fetched(share, request, now)
        part = self.partitions.get(request.partition)
        if part is None or part.closing:
            return None
        queue = part.queues[request.task]
        rows = part.as_rows(request, policy)
        slots = self._choose(part, queue, request, not rows, now)
        over = not len(slots) and self._is_tail(part, queue, request)
        if over and request.hold_end and not request.dropped:
            self.ends.append(request.key)
            return None
        if not (len(slots) or over or request.dropped):
            return None
        if request.team:
            return self._start_round(part, queue, request, slots, over and not request.dropped, now)
        claim_id = 0
        if len(slots):
            claim_id = self._start(part, queue, request, slots, request.worker, now).id
        self._note_wait(request, now)
        sealed = bool(over and not request.dropped)
        return part.grant(claim_id, slots, request.dropped, sealed, queue.ready_units(not rows))

    def _start(
        self, part: Partition, queue: TaskQueue, request: ClaimRequest, slots: np.ndarray, worker: str, now: float
    ) -> OpenClaim:
        self._note_spread_start(request.claim_id)
        claim = self.leases.start(part.name, request.task, worker, slots, now, request.owner, request.claim_id)
        queue.take(slots, claim.id)
        part.rows.holders[slots] += 1
        counters = self.counters_of(request.task)
        counters.claims_granted += 1
        counters.rows_granted += len(slots)
        return claim

    def _note_spread_start(self, claim_id: int) -> None:
        if claim_id and claim_id not in self.leases.open:
            self.note_spread(claim_id, True)

    def counters_of(self, task: str) -> report.TaskCounters:
        if task not in self.counters:
            self.counters[task] = report.TaskCounters()
        return self.counters[task]

    def _note_wait(self, request: ClaimRequest, now: float) -> None:
        waited = now - request.started
        if waited > 0:
            counters = self.counters_of(request.task)
            counters.wait_s += waited
            counters.longest_wait_s = max(counters.longest_wait_s, waited)

    def _choose(
        self, part: Partition, queue: TaskQueue, request: ClaimRequest, groups: bool, now: float
    ) -> np.ndarray:  # fmt: skip
        """Row slots for a claim, nothing when fewer than it needs are there. Drops what is too old on the way."""
        shares, needs = request.shares, request.needs
        while True:
            ready = queue.ready_units(groups)
            if not ready or (ready < needs and not (request.dropped or self._is_tail(part, queue, request))):
                return _NOTHING
            units = part.candidates(request, groups, shares * request.count)
            old = part.stale(units, groups, request, now)
            if old is not None and np.count_nonzero(old):
                request.dropped += self._drop_units(part, units[old], groups)
                continue
            if len(units) < shares * request.count:
                tail = self._is_tail(part, queue, request)
                if len(units) < needs and not (tail or request.dropped):
                    return _NOTHING
                if shares > 1 and not tail:
                    units = units[: len(units) // shares * shares]
            return part.members(units) if groups and len(units) else units

    def _is_tail(self, part: Partition, queue: TaskQueue, request: ClaimRequest) -> bool:
        """Whether nothing can become ready for this asker any more, except rows that it holds itself."""
        if not part.sealed:
            return False
        own = self.leases.held.get((request.partition, request.task, request.owner), 0)
        return queue.counts[WAITING] + queue.counts[CLAIMED] == own

    def _drop_units(self, part: Partition, units: np.ndarray, groups: bool) -> list[Dropped]:
        slots = part.members(units) if groups else units
        owner = part.rows.group[slots]
        found = [
            (int(part.groups.id[g]), part.handles(slots[owner == g]), "stale") for g in dict.fromkeys(owner.tolist())
        ]
        self.drop_stale(part, slots)
        return found

    # -- teams -----------------------------------------------------------------------------------------------------

    def _start_round(
        self, part: Partition, queue: TaskQueue, request: ClaimRequest, slots: np.ndarray, sealed: bool, now: float
    ) -> Grant:
        """Divides the rows of a new round, answers the ranks that wait for it, and returns the asker's share."""
        whole = part.grant(0, slots, request.dropped, sealed, 0)
        units = slots if request.unit == "rows" else part.rows.group[slots]
        index = divide(whole.tokens, units, request.ranks, request.split)
        if request.split == "same":
            claim = self._start(part, queue, request, slots, request.owner, now).id if len(slots) else 0
            whole.claim_id = claim
            shares = [whole] * request.ranks
        else:
            shares = []
            for rank, rows in enumerate(index):
                holder = f"{request.owner} rank {rank}"
                claim = self._start(part, queue, request, slots[rows], holder, now).id if len(rows) else 0
                shares.append(part_of(whole, rows, claim))
            shares[request.rank].dropped = request.dropped
        ready = queue.ready_units(not part.as_rows(request, pick(request.policy, request.unit, request.group_ids)))
        for share in shares:
            share.ready = ready
        self.teams.unpark(request)
        self.offer_round(team_key(request), shares, now)
        own = self.teams.take(request)
        assert own is not None  # was put there for this rank
        return self._fetched(own, request, now)

    def offer_round(self, key: TeamKey, shares: Sequence[Grant], now: float) -> None:
        """The next round of a team has its rows: the ranks that wait are answered."""
        for request in self.teams.offer(key, shares, now):
            share = self.teams.take(request)
            if share is not None:
                self._answer(request, self._fetched(share, request, now))

    def _fetched(self, share: Grant, request: ClaimRequest, now: float) -> Grant:
        claim = self.leases.open.get(share.claim_id)
        if claim is not None:
            claim.deadline = now + self.leases.lease_s
            if request.split == "same":
                claim.sharers = (claim.sharers or set()) | {request.worker}
            else:
                claim.worker = request.worker
        self._note_wait(request, now)
        return share

    def _takeable(self, share: Grant, split: str) -> bool:
        """Whether a rank that comes late may have its share: not after redelivery of its rows."""
        foreign = share.claim_id >> PAIR_SHIFT != self.pair
        if not share.claim_id or foreign or share.claim_id in self.leases.open:
            return True
        return split == "same" and self.leases.ended_as(share.claim_id) == _DONE

    def _lease_end(self, share: Grant) -> float | None:
        claim = self.leases.open.get(share.claim_id)
        return None if claim is None else claim.deadline

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
        wrong = len(slots)
        if part is not None and part.name == claim.partition:
            wrong = int(np.count_nonzero(part.queues[claim.task].holder(slots) != claim_id))
        if wrong:
            raise DockError(f"claim {claim_id} of task {claim.task!r} does not hold {wrong} of these rows")
        return claim, slots

    def done(self, claim_id: int, part: Partition | None, slots: np.ndarray | None, now: float) -> None:
        """The task has finished these rows of the claim (None: all)."""
        claim, slots = self.held(claim_id, part, slots, now)
        self._end(claim, slots, _DONE, True)
        self.wake(now)

    def divide(
        self, claim_id: int, part: Partition, shares: Sequence[np.ndarray], workers: Sequence[str], spread: int,
        now: float,
    ) -> list[int]:  # fmt: skip
        """Makes a claim of each share of an open claim; their ids, 0 for an empty share. `spread`: see `LeaseBook`."""
        claim, _ = self.held(claim_id, part, np.concatenate(shares), now)
        queue = part.queues[claim.task]
        ids = []
        for slots, worker in zip(shares, workers):
            if len(slots):
                self.leases.shorten(claim, slots, "it was divided")
                self._note_spread_start(spread)
                own = self.leases.start(claim.partition, claim.task, worker, slots, now, claim.key[2], spread).id
                queue.pass_on(slots, own)
            ids.append(own if len(slots) else 0)
        return ids

    def done_rows(self, part: Partition, task: str, slots: np.ndarray, now: float) -> None:
        """As `done`, for rows that any open claims of `task` hold."""
        self.schema.task(task)
        holders = part.queues[task].holder(slots)
        if np.count_nonzero(holders) != len(slots):
            raise DockError(f"{int((holders == 0).sum())} of these rows are not claimed by task {task!r}")
        for claim_id in np.unique(holders).tolist():
            self.done(claim_id, part, slots[holders == claim_id], now)

    def release(self, claim_id: int, part: Partition | None, slots: np.ndarray | None, now: float) -> None:
        """These rows of the claim (None: all) are offered again, before others."""
        claim, slots = self.held(claim_id, part, slots, now)
        self._end(claim, slots, _RELEASED, False)
        self.wake(now)

    def forget_worker(self, worker: str, now: float) -> int:
        """Takes back all claims of a lost worker; returns their number."""
        claims = self.leases.of_worker(worker)
        for claim in claims:
            self._end(claim, claim.slots, f"worker {worker!r} was forgotten", False)
        self.wake(now)
        return len(claims)

    def tick(self, now: float) -> None:
        """Ends leases and waits whose time has come."""
        if self._frozen_at is None:
            for claim in self.leases.run_out(now):
                self.counters_of(claim.task).leases_expired += 1
                self._end(claim, claim.slots, f"its lease of {self.leases.lease_s:g} s ran out", False)
            self.teams.tick(now)
        self.wake(now)
        for request in self.waiting.run_out(now):
            if request.team:
                self.teams.unpark(request)
            self._note_wait(request, now)
            self.outcomes.append((request.key, report.too_late(self, request, now)))

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the earliest."""
        times = [self.waiting.next_deadline()]
        if self._frozen_at is None:
            times += [self.leases.next_deadline(), self.teams.next_deadline()]
        return min((time for time in times if time is not None), default=None)

    def _end(self, claim: OpenClaim, slots: np.ndarray, reason: str, finished: bool) -> None:
        part = self.partitions[claim.partition]
        queue, rows = part.queues[claim.task], part.rows
        voluntary = reason in (_DONE, _RELEASED)
        self.leases.shorten(claim, slots, reason, voluntary)
        if voluntary and claim.id & SPREAD_CLAIM and claim.id not in self.leases.open:
            self.note_spread(claim.id, False)
        rows.holders[slots] -= 1
        live = slots
        doomed = rows.doomed[slots] if rows.doomed_count else None
        if doomed is not None:
            live = slots[~doomed]
        if finished:
            queue.finish(live)
            self.note_done(part, claim.task, live)
        elif len(live):
            self.counters_of(claim.task).rows_redelivered += len(live)
            queue.offer(live, CLAIMED)
        self.touched.add((part.name, claim.task))
        if doomed is not None and len(live) < len(slots):
            self.leave_doomed(part, claim.task, slots[doomed])
