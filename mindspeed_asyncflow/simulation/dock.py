"""The dock of a simulated run: the real controller on virtual time, without sockets and payload.

What the controller decides is what it decides in a real run: which rows a task gets, who holds them, what is too old.
In place of the warehouse there are a few numbers per row (`Rows`), and a wait is a future instead of a parked request.
Workers of the simulation call the verbs that write; loops see `workflow/dock_port.py: Dock`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock import report
from mindspeed_asyncflow.dock.client import Claim
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, Schema, grpo_tasks
from mindspeed_asyncflow.dock.controller import Controller
from mindspeed_asyncflow.dock.partition import ClaimRequest, Grant, Partition
from mindspeed_asyncflow.dock.table import Parallel
from mindspeed_asyncflow.errors import ClaimLost, DockError
from mindspeed_asyncflow.records import PromptRow

PARTITION = "train"
FOREVER = math.inf
UNSET = -1


@dataclass(frozen=True, slots=True)
class Truth:
    """What will become of rows, all [n]."""

    tokens: np.ndarray  # int64, of the whole answer
    reward: np.ndarray  # float64
    flat: np.ndarray  # bool: all rewards of the group are equal


class Rows(Parallel):
    """What the simulation knows of each row, by the controller's row slot. Versions: UNSET before the first token."""

    prompt: np.ndarray  # int64 tokens
    target: np.ndarray  # int64 tokens that the whole answer has
    done: np.ndarray  # int64 tokens generated so far
    oldest: np.ndarray  # int64 version of the oldest token
    newest: np.ndarray  # int64
    rounds: np.ndarray  # int64 generation batches that it was in
    reward: np.ndarray  # float64, what a scorer will find
    flat: np.ndarray  # bool: all rewards of its group are equal

    def __init__(self) -> None:
        super().__init__(
            prompt=("int64", 0), target=("int64", 0), done=("int64", 0), oldest=("int64", UNSET),
            newest=("int64", UNSET), rounds=("int64", 0), reward=("float64", 0),
            flat=("bool", 0),
        )  # fmt: skip
        self.spans: dict[int, list[tuple[int, int]]] = {}  # (end, version) of tokens before an update, by slot

    def fresh(self, slots: np.ndarray, prompt: np.ndarray, truth: Truth) -> None:
        self.prompt[slots], self.target[slots] = prompt, truth.tokens
        self.reward[slots], self.flat[slots] = truth.reward, truth.flat
        self.done[slots] = self.rounds[slots] = 0
        self.oldest[slots] = self.newest[slots] = UNSET
        for slot in slots.tolist() if self.spans else ():
            self.spans.pop(slot, None)

    def generated(self, slots: np.ndarray, tokens: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
        """More tokens, from versions `first` to `last` (UNSET where there is none)."""
        self.done[slots] += tokens
        old, some = self.oldest[slots], first != UNSET
        self.oldest[slots] = np.where(some & ((old == UNSET) | (first < old)), first, old)
        self.newest[slots] = np.maximum(self.newest[slots], last)

    def note_span(self, slots: np.ndarray, ends: np.ndarray, version: int) -> None:
        """Tokens up to `ends` that no earlier note covers were sampled by `version`."""
        for slot, end in zip(slots.tolist(), ends.tolist()):
            self.spans.setdefault(slot, []).append((end, version))

    def younger(self, slots: np.ndarray, oldest_allowed: int) -> np.ndarray:
        """int64 [n]: tokens of each row that no version before `oldest_allowed` has sampled."""
        tokens = self.done[slots].copy()
        for i in np.flatnonzero(self.oldest[slots] < oldest_allowed).tolist():
            before = [end for end, version in self.spans.get(int(slots[i]), ()) if version < oldest_allowed]
            tokens[i] -= max(before) if before and self.newest[slots[i]] >= oldest_allowed else tokens[i]
        return tokens


class SimDock:
    """`truth(group_ids, members)` is asked once for every row. `claim_s`: one round trip."""

    def __init__(
        self,
        truth: Callable[[np.ndarray, np.ndarray], Truth],
        *,
        with_reference: bool,
        claim_s: float = 0.0,
        patience_s: float = 2.0,
    ) -> None:
        self.patience_s, self.claim_s = patience_s, claim_s
        self.schema = Schema(GRPO_COLUMNS, grpo_tasks(with_reference))
        self.control = Controller(self.schema, lease_s=FOREVER)
        self.part: Partition = self.control.open(PARTITION)
        self.rows = Rows()
        self._truth = truth
        self._parked: dict[int, asyncio.Future[Grant]] = {}
        self._keys = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._put_mask = self.schema.mask(("prompt_ids", "truth", "fields"))
        made_by_others = {"prompt_ids", "truth", "fields", "reward", "advantage", "ref_logprobs"}
        read = {name for task in self.schema.tasks.values() for name in task.columns}
        self._answer_mask = self.schema.mask(sorted(read - made_by_others))
        self._score_mask = self.schema.mask(("reward", "advantage"))
        self._reference_mask = self.schema.mask(("ref_logprobs",))

    # -- what loops call -------------------------------------------------------------------------------------------

    async def put_groups(self, groups: Sequence[Sequence[PromptRow]]) -> None:
        await self._trip()
        counts = np.array([len(group) for group in groups], np.int64)
        ids = np.array([group[0].group_id for group in groups], np.int64)
        sizes = np.array([group[0].group_size for group in groups], np.int64)
        members = np.array([row.member for group in groups for row in group], np.int32)
        prompt = np.repeat(np.array([len(group[0].prompt_ids) for group in groups], np.int64), counts)
        self.control.check_put(PARTITION, ids, sizes, counts)
        # Lengths lie there before anybody is given the rows.
        with self.control.unwoken(self._now()):
            slots, _ = self.control.put(self.part, ids, sizes, counts, members, self._put_mask, prompt, self._now())
            self.rows.ensure(self.part.rows.capacity)
            self.rows.fresh(slots, prompt, self._truth(np.repeat(ids, counts), members))
        self._settle()

    async def claim(
        self,
        task: str,
        count: int,
        *,
        worker: str,
        unit: str = "groups",
        policy: str = "fifo",
        group_ids: Sequence[int] | None = None,
        at_least: int = 1,
        min_version: int | None = None,
        timeout_s: float | None = None,
    ) -> Claim:
        await self._trip()
        now = self._now()
        key = next(self._keys)
        request = ClaimRequest(
            task, PARTITION, count, worker, FOREVER if timeout_s is None else now + timeout_s, key, unit, policy,
            None if group_ids is None else list(group_ids), min_version, at_least,
        )  # fmt: skip
        grant = self.control.claim(request, now)
        if grant is not None:
            self._settle()
            return as_claim(grant)
        parked = self._parked[key] = asyncio.get_running_loop().create_future()
        self._settle()
        self._arm(request.deadline)
        try:
            return as_claim(await parked)
        except asyncio.CancelledError:
            self.control.cancel(key)
            if parked.done() and not parked.cancelled() and parked.exception() is None:
                self._take_back(parked.result())
                self._settle()
            raise
        finally:
            self._parked.pop(key, None)

    async def read(self, rows: np.ndarray, columns: Sequence[str]) -> Mapping[str, Any]:
        """Only what is a number per row exists here."""
        await self._trip()
        slots = self.slots(rows)
        unknown = set(columns) - {"reward"}
        if unknown:
            raise DockError(f"a simulated dock has no values of {', '.join(sorted(unknown))}; it keeps `reward`")
        return {"reward": self.rows.reward[slots]}

    async def done(self, claim_id: int) -> None:
        await self._trip()
        self.finish(claim_id)

    async def release(self, claim_id: int, rows: np.ndarray | None = None) -> None:
        await self._trip()
        self.give_back(claim_id, rows)

    async def free(self, rows: np.ndarray) -> None:
        await self._trip()
        self.control.free(self.part, self.slots(rows), self._now())
        self._settle()

    async def drop_groups(self, group_ids: Sequence[int], reason: str) -> None:
        await self._trip()
        self.control.drop(self.part, self.part.members(self.part.groups.find(group_ids)), reason, self._now())
        self._settle()

    async def missing(self, group_ids: Sequence[int]) -> list[int]:
        await self._trip()
        there = self.part.groups.lookup(np.array(group_ids, np.int64)) >= 0
        return [group for group, found in zip(group_ids, there.tolist()) if not found]

    async def drop_rows(self, rows: np.ndarray, reason: str) -> None:
        await self._trip()
        self.control.drop(self.part, self.slots(rows), reason, self._now())
        self._settle()

    async def forget_worker(self, worker: str) -> int:
        await self._trip()
        count = self.control.forget_worker(worker, self._now())
        self._settle()
        return count

    async def seal(self) -> None:
        self.control.seal(PARTITION, self._now())
        self._settle()

    async def stats(self) -> Mapping[str, Any]:
        nothing = {"used_bytes": 0, "arena_bytes": 1, "back_pressure_s": 0.0, "peers": {"stolen_rows": 0}}
        return report.stats(self.control) | nothing

    async def describe(self) -> str:
        lines = [f"dock (simulated): {self.part.rows.count} rows"]
        for task in self.schema.tasks:
            queue = self.part.queues[task]
            lines.append(f"  {task}: {queue.ready_rows} rows ready; {report.missing(self.control, self.part, task)}")
        lines += [
            f"  {r.worker} waits for {r.at_least} {r.unit} of {r.task}, {self._now() - r.started:.1f} s so far"
            for r in self.control.waiting
        ]
        return "\n".join(lines)

    # -- what simulated workers call; they take no time --------------------------------------------------------------

    def slots(self, rows: np.ndarray) -> np.ndarray:
        """Index into `rows` of these row handles. Raises StaleHandle for rows that are gone."""
        return self.control.resolve(rows)[1]

    def answered(self, claim_id: int, slots: np.ndarray) -> None:
        """These answers are complete. Raises ClaimLost when the claim was taken back."""
        now = self._now()
        self.control.held(claim_id, self.part, slots, now)
        r = self.rows
        self.control.commit(self.part, slots, self._answer_mask, r.done[slots], (r.oldest[slots], r.newest[slots]), now)
        self._settle()

    def scored(self, claim_id: int, slots: np.ndarray) -> None:
        self.control.held(claim_id, self.part, slots, self._now())
        self.control.commit(self.part, slots, self._score_mask, None, None, self._now())
        self._settle()

    def referenced(self, claim_id: int, slots: np.ndarray) -> None:
        self.control.held(claim_id, self.part, slots, self._now())
        self.control.commit(self.part, slots, self._reference_mask, None, None, self._now())
        self._settle()

    def give_back(self, claim_id: int, rows: np.ndarray | None = None) -> None:
        slots = None if rows is None else self.slots(rows)
        self.control.release(claim_id, None if rows is None else self.part, slots, self._now())
        self._settle()

    def finish(self, claim_id: int) -> None:
        self.control.done(claim_id, None, None, self._now())
        self._settle()

    # -- time ------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _trip(self) -> None:
        if self.claim_s > 0:
            await asyncio.sleep(self.claim_s)

    def _settle(self) -> None:
        """After every verb: the answers that it made."""
        outcomes, self.control.outcomes = self.control.outcomes, []
        self.control.departed.clear()
        for key, outcome in outcomes:
            parked = self._parked.get(key)  # type: ignore[call-overload]
            if parked is None or parked.done():
                if isinstance(outcome, Grant):
                    self._take_back(outcome)
            elif isinstance(outcome, Grant):
                parked.set_result(outcome)
            else:
                parked.set_exception(outcome)
        if self.control.outcomes:
            self._settle()

    def _take_back(self, grant: Grant) -> None:
        """Its asker was cancelled, and perhaps forgotten already."""
        if grant.claim_id:
            with contextlib.suppress(ClaimLost):
                self.control.release(grant.claim_id, None, None, self._now())

    def _arm(self, due: float | None) -> None:
        """A timer for the next end of a wait; leases do not end."""
        if due is None or due == FOREVER or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self._timer = None
        self.control.tick(max(due, self._now()))  # a timer may fire a clock's resolution early
        self._settle()
        self._arm(self.control.next_deadline())


def as_claim(grant: Grant) -> Claim:
    return Claim(
        grant.claim_id, grant.rows, grant.group_ids, grant.members, grant.version_min, grant.version_max, grant.tokens,
        grant.dropped, grant.sealed, None, grant.ready,
    )  # fmt: skip
