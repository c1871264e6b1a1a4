"""The loops of a run, and the map of them.

          feed ──put──► [dock] ──► rollout × R ──► [dock] ──► score ──► [dock] ──► train ──► weights
           ▲                                        └──► reference (if kl_coef > 0) ──┘         │
           └───────── window opens when a version is published ◄── [relay] ◄── publish ◄────────┘

    loop        consumes                    waits for                          unblocked by
    feed        prompts of the data stream  batch j <= published + max_lag     publish
    rollout     task `rollout`, groups      groups put; weights loaded         feed; publish
    update      published versions          the next one (`in_flight` only)    publish
    score       task `reward`, groups       answers of a whole group           rollout
    reference   task `reference`, groups    answers of a whole group           rollout
    train       task `train`, groups        scored groups of batch `step`      score (and reference)
    publish     versions that train made    every rank wrote its shards        train
    watchdog    -                           no progress for watchdog_s         ends the run, names who waits for whom

Loops carry row ids; only workers touch tensors. Step k trains batch k at version k and makes version k+1. Trainer ranks
write it to the relay while they train step k+1, so publish runs beside train; only the next optimizer step waits for
it. How a replica comes to new weights (`workflow.update`) is in `weight_sync.py`. With max_lag 0 the loops are the
synchronous run: a replica gets its whole share of a batch as one call, and the trainer takes groups in issue order in
chunks of fixed size, so that a seed fixes every bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import Claim, DockClient
from mindspeed_asyncflow.errors import DeadlineExceeded, DockError, EngineError, WorkerLost
from mindspeed_asyncflow.observe.trace import get_tracer
from mindspeed_asyncflow.records import OptimReport
from mindspeed_asyncflow.workflow import batcher
from mindspeed_asyncflow.workflow.book import Issue, StepBook
from mindspeed_asyncflow.workflow.recorder import StepRecorder
from mindspeed_asyncflow.workflow.staleness import StalenessWindow
from mindspeed_asyncflow.workflow.train_worker import FinishReport
from mindspeed_asyncflow.workflow.weight_sync import WeightSync, expected_of
from mindspeed_asyncflow.workflow.workers import RowBatch

PARTITION = "train"
CLAIM_SLICE_S = 2.0  # a parked claim is renewed this often, so that a stopping run never waits for one longer


class Run:
    """One training run over workers that are started already."""

    def __init__(
        self,
        config: Config,
        dock: DockClient,
        batches: Callable[[], Sequence[Issue] | None],
        rollouts: Sequence[Any],
        scorer: Any,
        references: Sequence[Any],
        trainers: Sequence[Any],
        leaders: Sequence[int],
        sync: WeightSync,
        recorder: StepRecorder,
        evaluate: Callable[[], Awaitable[float | None]],
        save: Callable[[int], Awaitable[None]],
    ) -> None:
        """`batches()` gives the prompts of the next step, None at the end of the data. Workers are proxies whose
        methods can be awaited (`workflow/workers.py`, `workflow/train_worker.py`). `leaders` are the indices of one
        rank of every data-parallel replica."""
        self.config, self.dock, self.batches = config, dock, batches
        self.rollouts, self.scorer, self.references = rollouts, scorer, references
        self.trainers, self.leaders = trainers, leaders
        self.sync, self.recorder, self.evaluate, self.save = sync, recorder, evaluate, save
        self.window = StalenessWindow(config.workflow.max_lag)
        self.book = StepBook(config.algorithm.group_size)
        self.made: asyncio.Queue[tuple[int, OptimReport, asyncio.Future]] = asyncio.Queue()  # versions to publish
        self.step = 0
        self.bad_steps = 0
        self.progress_at = time.monotonic()

    async def train(self) -> None:
        """Run all loops until the last step is trained or the data ends; raise the first error of any loop."""
        loops = [self.feed_loop(), self.score_loop(), self.watchdog(), self.train_loop(), self.publish_loop()]
        loops += [self.rollout_loop(i) for i in range(len(self.rollouts))]
        loops += [self.reference_loop(i) for i in range(len(self.references))]
        if self.config.workflow.update == "in_flight":
            loops += [self.sync.follow(i) for i in range(len(self.rollouts))]
        tasks = [asyncio.create_task(loop) for loop in loops]
        trained = tasks[3]
        try:
            while not trained.done():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                tasks = [t for t in tasks if not t.done()] or [trained]
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(DockError, WorkerLost):  # wakes the claims that still wait
                await asyncio.to_thread(self.dock.seal, PARTITION)
            await asyncio.gather(*tasks, return_exceptions=True)
        trained.result()

    async def feed_loop(self) -> None:
        """Prompts into the dock, one batch at a time, as far ahead as the window allows."""
        for batch in range(self.config.trainer.steps):
            await self.window.wait_to_issue(batch)
            issues = self.batches()
            if issues is None:
                break
            await self.put(batch, issues)
        await self.book.end()

    async def put(self, batch: int, issues: Sequence[Issue]) -> None:
        groups = self.book.make_groups(batch, issues)
        with get_tracer().span("feed/put", lane="feed", step=batch, groups=len(groups)):
            await asyncio.to_thread(self.dock.put_groups, PARTITION, groups)
        self.window.issued += sum(len(g) for g in groups)
        await self.book.add(batch, groups)
        self.progressed()

    async def whole_batches(self) -> AsyncIterator[list[int]]:
        """The groups of each batch as soon as it is issued; ends with the data."""
        batch = 0
        while await self.book.wait_for_batch(batch):
            yield self.book.pending(batch)
            batch += 1

    async def rollout_loop(self, index: int) -> None:
        """Prompts to answers."""
        if self.config.workflow.max_lag == 0:  # a fixed share in one call: the same engine batch on every run
            async for groups in self.whole_batches():
                mine = [g for g in groups if g % len(self.rollouts) == index]
                if mine:
                    await self.generate(index, len(mine), group_ids=mine, at_least=len(mine))
            return
        share = math.ceil(self.config.workflow.groups_per_step / len(self.rollouts))
        room = max(1, self.config.rollout.max_running // self.config.algorithm.group_size)
        while True:
            await self.generate(index, min(share, room))

    async def generate(self, index: int, groups: int, **which: Any) -> None:
        """One generation batch; before it lies the boundary where a replica loads new weights."""
        claim = await self.claim("rollout", groups, worker=f"rollout{index}", **which)
        needed = self.window.needed_for(self.book.last_batch(claim.group_ids.tolist()))
        async with self.sync.boundary(index, needed) as since:
            with self.recorder.busy(f"rollout{index}"):
                report = await self.rollouts[index].generate(claim.claim_id, rows_of(claim))
        self.sync.check_served(index, since, report.served)
        self.recorder.generated(report)
        self.progressed()

    async def score_loop(self) -> None:
        """Answers to rewards and advantages, whole groups only."""
        if not self.config.workflow.overlap:
            async for groups in self.whole_batches():
                await self.score(len(groups), group_ids=groups, at_least=len(groups))
            return
        while True:
            await self.score(self.config.workflow.groups_per_step)

    async def score(self, groups: int, **which: Any) -> None:
        claim = await self.claim("reward", groups, worker="scorer", **which)
        report = await self.scorer.score(claim.claim_id, rows_of(claim))
        self.recorder.scored(report)
        if report.unscored:
            self.drop_unscored(claim, report.unscored)
        self.progressed()

    def drop_unscored(self, claim: Claim, unscored: dict[int, str]) -> None:
        """A group without any score leaves its batch: the step trains with what is left."""
        self.window.dropped["unscored"] += len(unscored)
        for group in np.unique(claim.group_ids):
            if all(int(r) in unscored for r in claim.rows[claim.group_ids == group]):
                self.book.close_group(int(group))

    async def reference_loop(self, index: int) -> None:
        """Answers to log-probabilities of the frozen reference policy."""
        while True:
            claim = await self.claim("reference", self.config.workflow.groups_per_step, worker=f"reference{index}")
            self.recorder.referenced(await self.references[index].logprobs(claim.claim_id, rows_of(claim)))
            self.progressed()

    async def train_loop(self) -> None:
        """Scored groups to weights: accumulate the batch in chunks as groups become ready, then one optimizer step."""
        for step in range(self.config.trainer.steps):
            self.step = step
            if not await self.book.wait_for_batch(step):
                self.recorder.data_ended(step)
                break
            rows = samples = tokens = 0
            while self.book.pending(step):
                claim = await self.claim_to_train(step)
                if claim is None:
                    continue
                shown = self.config.observe.samples_per_step if rows == 0 else 0
                rows += len(claim.rows)
                got_samples, got_tokens = await self.train_chunk(step, claim, shown)
                samples, tokens = samples + got_samples, tokens + got_tokens
            with self.recorder.busy("trainer"):
                finish = await self.all_ranks("finish", step + 1, tokens, samples)
            self.count_bad(finish[0])
            self.window.advance(step + 1)
            self.made.put_nowait((step + 1, finish[0].optim, expected_of(self.trainers)))
            self.window.trained += rows
            await self.recorder.step_done(step, finish, self.window, self.book, self.sync, await self.stats())
            await self.after_step(step)
        await self.window.wait_published(self.window.version)

    async def publish_loop(self) -> None:
        """Versions to the relay: when every rank has written its shards, replicas may load and the window opens."""
        while True:
            version, optim, expected = await self.made.get()
            self.sync.publish(await self.all_ranks("published", version), expected, optim)
            await self.window.publish(version)
            self.progressed()

    async def claim_to_train(self, step: int) -> Claim | None:
        """The next groups of this step; here, and only here, the staleness law is enforced."""
        pending = self.book.pending(step)
        chunk = self.config.trainer.stream_groups or max(1, self.config.workflow.groups_per_step // 4)
        if not self.config.workflow.overlap:
            chunk = len(pending)
        chunk = min(chunk, len(pending))
        wanted = pending[:chunk] if self.config.workflow.max_lag == 0 else pending
        claim = await self.claim_once(
            "train",
            len(wanted),
            worker="trainer",
            group_ids=wanted,
            at_least=chunk,
            min_version=self.window.oldest_allowed(),
        )
        if claim is None:
            return None
        for group, rows, reason in claim.dropped:
            self.window.dropped[reason] += len(rows)
            batch, issue = self.book.close_group(int(group))
            await self.put(batch, [issue])
        return claim if len(claim.rows) else None

    async def train_chunk(self, step: int, claim: Claim, shown: int) -> tuple[int, int]:
        """Gradients of one chunk; returns (samples, trained tokens) for the denominator. `shown`: answers to print."""
        t = self.config.trainer
        infos = [
            batcher.RowInfo(int(r), int(g), int(m), int(n))
            for r, g, m, n in zip(claim.rows, claim.group_ids, claim.members, claim.tokens)
        ]
        plan = batcher.plan(
            infos, t.data_parallel, t.micro_batch_tokens, t.pipeline_parallel if t.virtual_pipeline else 1
        )
        versions = dict(zip(claim.rows.tolist(), zip(claim.version_min.tolist(), claim.version_max.tolist())))
        groups = {i.row: (i.group_id, i.member) for i in infos}
        with self.recorder.busy("trainer"):
            reports = await self.all_ranks("train", plan, versions, groups, shown)
        rewards = await asyncio.to_thread(self.served, claim)
        for group in np.unique(claim.group_ids):
            self.book.close_group(int(group))
        one_per_replica = [reports[i] for i in self.leaders]
        self.recorder.trained(step, claim, rewards, one_per_replica)
        self.progressed()
        return len(claim.rows), int(sum(r.sums["actor/tokens_count"] for r in one_per_replica))

    def served(self, claim: Claim) -> np.ndarray:
        """Trained rows leave the dock; returns their rewards, float64 [n]."""
        rewards = np.array(self.dock.read(claim.rows, ["reward"])["reward"], dtype=np.float64)
        self.dock.done(claim.claim_id)
        self.dock.free(claim.rows)
        return rewards

    def count_bad(self, finish: FinishReport) -> None:
        if not finish.optim.bad_tensor:
            self.bad_steps = 0
            return
        self.bad_steps += 1
        if self.bad_steps >= self.config.trainer.max_bad_steps:
            raise EngineError(
                f"the gradient of {finish.optim.bad_tensor} was not finite in {self.bad_steps} steps in a row "
                f"(trainer.max_bad_steps); lower trainer.lr or look at the samples of step {self.step}"
            )

    async def after_step(self, step: int) -> None:
        every, save_every = self.config.evaluation.every, self.config.trainer.save_every
        last = step + 1 == self.config.trainer.steps
        if every and (step + 1) % every == 0 and not last:
            await self.window.wait_published(step + 1)
            self.recorder.evaluated(step + 1, await self.evaluate())
        if save_every and (step + 1) % save_every == 0 and not last:
            await self.save(step + 1)

    async def watchdog(self) -> None:
        """No silent hang: without progress for `watchdog_s`, stop and say who waits for whom."""
        limit = self.config.workflow.watchdog_s
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            idle = time.monotonic() - self.progress_at
            if idle > limit:
                waiting = await asyncio.to_thread(self.dock.describe)
                open_groups = ", ".join(f"step {b}: {n} groups" for b, n in self.book.open_batches())
                raise DeadlineExceeded(
                    f"no progress for {idle:.0f} s (workflow.watchdog_s {limit:g}) in step {self.step}; "
                    f"open: {open_groups or 'nothing'}\n{self.sync.describe()}\n{waiting}"
                )

    async def all_ranks(self, method: str, *args) -> list[Any]:
        return list(await asyncio.gather(*(getattr(t, method)(*args) for t in self.trainers)))

    async def claim(self, task: str, count: int, **how) -> Claim:
        """Rows for `task`. The watchdog bounds the wait."""
        while True:
            claim = await self.claim_once(task, count, **how)
            if claim is not None and len(claim.rows):
                return claim

    async def claim_once(self, task: str, count: int, *, worker: str, **how) -> Claim | None:
        with get_tracer().span(f"wait/{task}", lane=f"{worker} waits"):
            try:
                return await asyncio.to_thread(
                    self.dock.claim,
                    task,
                    count,
                    partition=PARTITION,
                    unit="groups",
                    timeout_s=CLAIM_SLICE_S,
                    worker=worker,
                    **how,
                )
            except DeadlineExceeded:
                return None

    async def stats(self) -> dict:
        return await asyncio.to_thread(self.dock.stats)

    def progressed(self) -> None:
        self.progress_at = time.monotonic()


def rows_of(claim: Claim) -> RowBatch:
    return RowBatch(claim.rows, claim.group_ids, claim.members)
