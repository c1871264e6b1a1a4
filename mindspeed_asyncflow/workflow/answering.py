"""Prompts to answers: one loop per replica (or several, `workflow.lanes`), and who is in the pool of replicas.

    max_lag 0     every put is dealt in equal shares, one call each, so that a seed fixes every engine batch
    max_lag >= 1  a replica claims as soon as it is free; a fast one answers more

The pool may change while the run goes on. A replica that joins gets a loop. One that leaves or dies gives back what it
holds; others answer that, from the tokens that are in the dock already. With max_lag 0 it waits for the process that
replaces a dead one, so that the seeds give the same answers. Only when nobody is left, and nobody is still starting,
the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from mindspeed_asyncflow.dock.client import Claim
from mindspeed_asyncflow.errors import ClaimLost, DockError, StaleHandle, WorkerLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.workflow.clock import in_time
from mindspeed_asyncflow.workflow.job import Job
from mindspeed_asyncflow.workflow.workers import RowBatch

REPACK_EVERY_S = 0.5
STOP_AGAIN_S = 0.02
GRACE_S = 5.0  # after the deadline that a worker keeps itself
T = TypeVar("T")


class Answering:
    def __init__(self, job: Job) -> None:
        self.job = job
        self._loops: dict[int, list[asyncio.Task[None]]] = {}
        self._parcels: dict[int, asyncio.Queue[tuple[list[int], bool]]] = {}  # max_lag 0: groups dealt to each replica
        self._holds: dict[int, list[int]] = {}  # those that it is answering
        self._since: dict[int, int] = {}  # replicas that answer: version at the beginning of their batch
        self._moved: dict[int, list[asyncio.Task[None]]] = {}  # answers that such a replica has taken over
        self._handing_over = asyncio.Lock()  # held while released answers wait for the replica that they are meant for

    # ---- who is in the pool ------------------------------------------------------------------------------------------

    def start(self) -> None:
        for index in self.job.crew.rollouts:
            self._start(index)
        if self.job.config.workflow.max_lag == 0:
            self.job.spawn(self.deal_loop(self.job.book.follow()))
        if self.job.config.workflow.repack_below:
            self.job.spawn(self.repack_loop())

    def _start(self, index: int) -> None:
        job, w = self.job, self.job.config.workflow
        if w.max_lag == 0:
            self._parcels.setdefault(index, asyncio.Queue())
            loops = [self.parcel_loop(index)]
        else:
            loops = [self.claim_loop(index) for _ in range(w.lanes)]
        if w.update == "in_flight" and not job.turns.shares(index):
            loops.append(job.sync.follow(index))
        self._loops[index] = [job.spawn(self._guard(index, loop)) for loop in loops]

    def join(self, index: int, worker: Any) -> None:
        """A replica is up and serves from now on."""
        job = self.job
        job.crew.starting.discard(index)
        job.crew.rollouts[index] = worker
        job.sync.join(index, worker)
        job.recorder.joined(f"rollout{index}")
        job.events.note("joined", replica=index)
        get_logger("rollout").info("rollout%d joins at version %d", index, job.window.published)
        self._start(index)

    async def leave(self, index: int) -> None:
        """A replica stops answering; what it holds is answered by others, from the tokens that are in the dock where
        answers can be interrupted (else a stop would leave groups behind that are whole for nobody)."""
        if self.job.interruptible:
            await self._ask(index, "stop")
        if index in self.job.crew.rollouts:
            await self._remove(index, "left")

    async def lost(self, index: int, error: WorkerLost) -> None:
        """A replica is dead. Raises `WorkerLost` when it was the last one and none is starting."""
        crew = self.job.crew
        if index not in crew.rollouts:
            return
        if crew.comes_back(index):
            crew.starting.add(index)
        rest = "the others go on" if len(crew.rollouts) > 1 else "answers wait for the next one"
        get_logger("rollout").warning("rollout%d is lost, %s: %s", index, rest, error)
        await self._remove(index, "lost")
        if not crew.rollouts and not crew.starting:
            raise WorkerLost(f"no rollout replica is left; the last one: {error}") from error

    def failed_to_start(self, index: int, error: Exception) -> None:
        """A replica that was expected will not come."""
        self.job.crew.starting.discard(index)
        self._deal_again(index)
        get_logger("rollout").warning("rollout%d did not start, the others go on: %s", index, error)
        if not self.job.crew.rollouts and not self.job.crew.starting:
            raise WorkerLost(f"no rollout replica is left; the last one did not start: {error}") from error

    async def _remove(self, index: int, why: str) -> None:
        job = self.job
        del job.crew.rollouts[index]
        for task in self._loops.pop(index, []):
            if task is not asyncio.current_task():
                task.cancel()
        job.sync.retire(index)
        job.turns.forget(index)
        job.recorder.left(f"rollout{index}")
        held = await job.dock.forget_worker(f"rollout{index}")
        job.events.note(why, replica=index, claims=held)
        if index not in job.crew.starting:
            self._deal_again(index)
        elif began := [g for g in self._holds.pop(index, []) if job.book.is_open(g)]:
            later, self._parcels[index] = self._parcels[index], asyncio.Queue()
            self._parcels[index].put_nowait((began, False))
            while not later.empty():
                self._parcels[index].put_nowait(later.get_nowait())

    def _deal_again(self, index: int) -> None:
        """max_lag 0: others answer what was dealt to a replica that does not come back."""
        if index in self._parcels:
            parcels, began = self._parcels.pop(index), self._holds.pop(index, [])
            self._deal([g for g in began if self.job.book.is_open(g)], whole=False)
            while not parcels.empty():
                self._deal(*parcels.get_nowait())

    async def _guard(self, index: int, loop: Any) -> None:
        try:
            await loop
        except WorkerLost as error:
            await self.lost(index, error)

    async def _ask(self, index: int, method: str) -> int:
        """What replica `index` answers; 0 where it is found dead."""
        worker = self.job.crew.rollouts.get(index)
        try:
            return 0 if worker is None else await self._in_time(index, getattr(worker, method)())
        except WorkerLost as error:
            await self.lost(index, error)
            return 0

    async def _in_time(self, index: int, work: Coroutine[Any, Any, T]) -> T:
        """What a replica gives within `rollout.timeout_s`, which a worker that lives keeps itself. Raises `WorkerLost`,
        and ends the process, where nothing comes: it hangs."""
        limit_s = self.job.config.rollout.timeout_s + GRACE_S
        try:
            return await in_time(work, limit_s)
        except asyncio.TimeoutError:
            self.job.crew.end(index)
            raise WorkerLost(f"rollout{index} hangs: nothing came for {limit_s:g} s (rollout.timeout_s)") from None

    # ---- answers -----------------------------------------------------------------------------------------------------

    async def deal_loop(self, puts: asyncio.Queue[list[int]]) -> None:
        """max_lag 0: the groups of every put in equal shares, fixed when the put is made."""
        while True:
            self._deal(await puts.get(), whole=True)

    def _deal(self, groups: list[int], whole: bool) -> None:
        """`whole`: none of these groups was answered in part, so a replica gets its share as one call."""
        members = sorted(self._parcels)
        for turn, index in enumerate(members):
            if mine := groups[turn :: len(members)]:
                self._parcels[index].put_nowait((mine, whole))

    async def parcel_loop(self, index: int) -> None:
        """max_lag 0: what was dealt to this replica."""
        job, worker = self.job, f"rollout{index}"
        while True:
            groups, whole = await self._parcels[index].get()
            self._holds[index] = groups
            if whole:
                claim = await job.claim_groups("rollout", groups, worker=worker)
                if claim is None:
                    continue
                await self.generate(index, claim)
            while (
                rest := await job.claim_now("rollout", len(groups), worker=worker, group_ids=groups, timeout_s=0.0)
            ) is not None and len(rest.rows):
                await self.generate(index, rest)

    async def claim_loop(self, index: int) -> None:
        """max_lag >= 1: as much as there is, up to an equal share of a step."""
        job, c = self.job, self.job.config
        share = math.ceil(job.config.groups_issued_per_step / max(1, len(job.crew.rollouts) + len(job.crew.starting)))
        groups = max(1, min(share, c.rollout.max_running // c.algorithm.group_size) // c.workflow.lanes)
        unit = {"unit": "rows", "policy": "oldest"} if job.interruptible else {"unit": "groups"}
        count = groups * c.algorithm.group_size if job.interruptible else groups
        while True:
            async with self._handing_over:
                pass
            await job.turns.open(index)
            claim = await job.claim("rollout", count, worker=f"rollout{index}", **unit)
            needed = self._needed(claim)
            if job.turns.is_open(index) and not job.sync.holds.forbids(index, needed):
                await self.generate(index, claim)
            else:  # the trainer has taken the device back, or an evaluation holds it: others shall not wait for that
                await job.dock.release(claim.claim_id)
                await job.sync.holds.over(index, needed)

    async def generate(self, index: int, claim: Claim) -> None:
        """One generation batch; before it lies the boundary where a replica loads new weights."""
        job = self.job
        groups = list(dict.fromkeys(claim.group_ids.tolist()))
        needed = self._needed(claim)
        async with job.turns.generating(index), job.sync.boundary(index, needed) as since:
            job.book.sampled(groups, since)
            with job.recorder.busy(f"rollout{index}"):
                self._since[index] = since
                try:
                    await self._answer(index, claim, since)
                finally:
                    self._since.pop(index, None)
                while moved := self._moved.pop(index, None):
                    await asyncio.gather(*moved)

    def _needed(self, claim: Claim) -> int:
        """Oldest version that may answer these rows."""
        return self.job.window.needed_for(self.job.book.last_batch(np.unique(claim.group_ids).tolist()))

    async def stop_all(self) -> None:
        """Every running answer ends with what it has; returns when the dock has all of it."""
        while self._since:
            await asyncio.gather(*(self._ask(index, "stop") for index in list(self._since)))
            if self._since:  # a batch may not have reached its engine yet
                await asyncio.sleep(STOP_AGAIN_S)

    async def _answer(self, index: int, claim: Claim, since: int) -> None:
        job = self.job
        job.events.note("answering", replica=index, since=since, rows=members_of(claim))
        try:
            with job.calling(f"rollout{index}", "generate"):
                report = await self._in_time(index, job.crew.rollouts[index].generate(claim.claim_id, rows_of(claim)))
        except (ClaimLost, StaleHandle) as error:  # as with a dock pair that was started again
            get_logger("rollout").warning("rollout%d begins again with what it had: %s", index, error)
            with contextlib.suppress(DockError):
                await job.dock.release(claim.claim_id)
            return
        job.sync.check_served(index, since, report.served)
        job.recorder.generated(report)
        job.events.note(
            "generated", replica=index, since=since, rows=members_of(claim), unfinished=len(report.unfinished)
        )
        job.progressed()

    def describe(self) -> str:
        """Who is there and who answers, one line for messages of the no-progress watchdog."""
        crew = self.job.crew
        words = [
            f"rollout{i} {'answers' if i in self._since else 'has nothing to answer'}" for i in sorted(crew.rollouts)
        ]
        words += [f"rollout{i} is starting" for i in sorted(crew.starting)]
        return "replicas: " + ("; ".join(words) or "none")

    # ---- the last answers of a batch ---------------------------------------------------------------------------------

    async def repack_loop(self) -> None:
        """Nothing waits and every replica answers: one with few answers left hands them to the busiest that has room,
        and is free for new weights and the next batch."""
        while True:
            await asyncio.sleep(max(REPACK_EVERY_S, 0.01 * self.job.recorder.last_step_s))
            members = list(self.job.crew.rollouts)
            if len(members) > 1 and set(self._since) == set(members):
                counts = dict(zip(members, await asyncio.gather(*(self._ask(i, "running") for i in members))))
                await self._hand_over(counts)

    async def _hand_over(self, counts: dict[int, int]) -> None:
        config, served = self.job.config, self.job.sync.served
        source = min(counts, key=lambda i: (counts[i], i))
        most = config.rollout.max_running - counts[source]
        able = [i for i in counts if i != source and counts[source] <= counts[i] <= most and i in self._since]
        able = [i for i in able if served[i] >= served[source]]
        if not able or not 0 < counts[source] <= config.workflow.repack_below:
            return
        target = max(able, key=lambda i: (counts[i], -i))
        async with self._handing_over:
            if not await self._ask(source, "stop"):
                return
            claim = await self.job.claim_now(
                "rollout", counts[source], worker=f"rollout{target}", unit="rows", policy="oldest", timeout_s=0.0
            )
            if claim is None or not len(claim.rows):
                return
        if target not in self._since:  # its batch ended meanwhile
            await self.job.dock.release(claim.claim_id)
            return
        self.job.events.note("repacked", source=source, target=target, rows=members_of(claim))
        take_over = self._guard(target, self._answer(target, claim, self._since[target]))
        self._moved.setdefault(target, []).append(self.job.spawn(take_over))


def rows_of(claim: Claim) -> RowBatch:
    return RowBatch(claim.rows, claim.group_ids, claim.members)


def members_of(claim: Claim) -> list[list[int]]:
    """(group id, member) of the rows, for the event record."""
    return np.stack([claim.group_ids, claim.members], axis=1).tolist()
