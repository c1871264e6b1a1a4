"""Scored groups to weights, and weights to the relay.

    take     a step trains
    issued   the groups issued for it, and what steps before it left over
    ready    the first ones that are complete, whatever they were issued for. Room is kept for every group that the
             next step could not train any more (`StepBook.due`), so that nothing becomes stale by being passed over.

A step ends when it has trained `groups_per_step` groups, or when nothing is open that it could train.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from mindspeed_asyncflow.algorithms.moments import Moments, rescale
from mindspeed_asyncflow.dock.client import Claim
from mindspeed_asyncflow.errors import ClaimLost, EngineError, StaleHandle
from mindspeed_asyncflow.records import OptimReport
from mindspeed_asyncflow.workflow import batcher
from mindspeed_asyncflow.workflow.between import Between
from mindspeed_asyncflow.workflow.evaluating import Evaluation
from mindspeed_asyncflow.workflow.feeding import Feeder
from mindspeed_asyncflow.workflow.job import Job
from mindspeed_asyncflow.workflow.train_worker import ChunkRules, FinishReport
from mindspeed_asyncflow.workflow.valuing import Valuing
from mindspeed_asyncflow.workflow.weight_sync import expected_of


class Save(Protocol):
    """Takes a checkpoint of the state between two steps; the files may be written after it returns."""

    async def __call__(self, step: int, last: bool = False) -> None: ...


@dataclass(slots=True)
class _Sums:
    """Of the running step."""

    samples: int = 0
    sequences: int = 0  # those that the loss counts
    tokens: int = 0  # those that the loss counts


class Training:
    def __init__(
        self,
        job: Job,
        feeder: Feeder,
        stop_answering: Callable[[], Awaitable[None]],
        evaluation: Evaluation | None,
        save: Save,
        valuing: Valuing,
        permitted: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`permitted` waits until replicas may have a version that is in the relay."""
        self.valuing, self.permitted = valuing, permitted
        self.job, self.feeder, self.stop_answering = job, feeder, stop_answering
        self.evaluation, self.save = evaluation, save
        self.made: asyncio.Queue[tuple[int, OptimReport, asyncio.Future]] = asyncio.Queue()  # versions to publish
        self.finish: list[FinishReport] = []  # of the newest step
        self.bad_steps = 0
        self.issues: dict[int, tuple[int, int]] = {}  # epoch and prompt index of the groups that the step has
        self.between = Between(job.book.tell)  # what somebody outside asks for
        self._held = False  # the window, for what comes between this step and the next one
        w = job.config.workflow
        self.shared = w.lend or w.schedule == "colocated"
        # Shared devices change hands once per step, when the whole batch is ready; without lag the chunks must not
        # depend on the moment at which a group was dropped; and some advantages depend on the whole batch.
        self.drops = job.config.algorithm.dynamic_sampling or w.oversample > 1
        self.stream = job.config.trainer.stream_groups or max(1, w.groups_per_step // 4)
        self.batch_level = job.config.algorithm.batch_level
        self.whole = not w.overlap or self.shared or (w.max_lag == 0 and self.drops) or self.batch_level

    async def train_loop(self) -> None:
        """Accumulate a batch in chunks as groups become ready, then one optimizer step."""
        job = self.job
        for step in range(job.window.version, job.config.trainer.steps):
            job.step, self.feeder.taken = step, 0
            await self._idle(step)
            if not await job.book.wait_for_batch(step) and not job.book.count():
                job.recorder.data_ended(step)
                break
            ready = await self._whole_step(step) if self.whole else []
            async with job.turns.training():
                sums, rules = _Sums(), await self._rules(ready)
                for whole in ready:
                    await self._train(step, whole, rules, sums)
                while (claim := await self.next_chunk(step)) is not None:
                    await self._train(step, claim, rules, sums)
                await self._finish(step, sums)
            await job.recorder.step_done(
                step, self.finish, job.window, job.book, job.sync, await job.dock.stats(), job.turns
            )
            await self._after_step(step)
        await self.between.do(job.window.version)
        await job.window.wait_published(job.window.version)
        if self.evaluation is not None:
            await self.evaluation.ended()
        await self.save(job.window.version, last=True)

    async def _idle(self, step: int) -> None:
        """Until the batch of `step` is there, what is asked for is done at once."""
        book = self.job.book
        while not (book.has(step) or book.ended):
            if self.between.wanted:
                await self.between.do(step)
            else:
                await book.change()

    async def _whole_step(self, step: int) -> list[Claim]:
        claims = []
        while (claim := await self.next_chunk(step)) is not None:
            claims.append(claim)
        if self.job.config.workflow.max_lag == 0:
            await self._drop_surplus(step)
        return claims

    async def _rules(self, ready: list[Claim]) -> ChunkRules:
        """How this step trains its rows; `ready` is its whole batch where advantages depend on that."""
        job, config = self.job, self.job.config
        law = job.window.oldest_allowed() if config.workflow.stale == "mask" else None
        rules = ChunkRules(job.window.version, law)
        if not self.batch_level:
            return rules
        rows = [row for claim in ready for row in claim.rows[np.lexsort([claim.members, claim.group_ids])].tolist()]
        shares = [part.tolist() for part in np.array_split(np.array(rows, np.int64), len(job.crew.leaders))]
        asked = (self._moments(rank, share, rules) for rank, share in zip(job.crew.leaders, shares))
        tokens = rewards = Moments()
        for of_tokens, of_rewards in await asyncio.gather(*asked):
            tokens, rewards = tokens.merge(of_tokens), rewards.merge(of_rewards)
        shift, factor = rescale(config.algorithm, tokens, rewards)
        return replace(rules, shift=shift, factor=factor)

    async def _moments(self, rank: int, rows: list[int], rules: ChunkRules) -> tuple[Moments, Moments]:
        with self.job.calling(f"trainer{rank}", "moments"):
            return await self.job.crew.trainers[rank].moments(rows, rules)

    async def _finish(self, step: int, sums: _Sums) -> None:
        job = self.job
        tokens = sums.tokens if step >= self.valuing.warmup else 0  # until then only the critic learns
        with job.recorder.busy("trainer"):
            trainer = job.all_ranks("finish", step + 1, tokens, sums.sequences)
            self.finish, critic = await asyncio.gather(trainer, self.valuing.finish(step + 1))
        job.recorder.critic_finished(critic)
        optim = self.finish[0].optim
        job.events.note("finished", version=step + 1, tokens=tokens, samples=sums.sequences, optim=optim)
        self._count_bad(self.finish[0])
        self._held = job.config.workflow.max_lag == 0 and (self._is_saved(step + 1) or self.between.wanted)
        if self._held:
            job.window.hold()  # nothing of the next batch is in the checkpoint: who goes on from it repeats every bit
        job.window.advance(step + 1)
        job.window.trained += sums.samples
        self.feeder.taken, self.issues = 0, {}
        expected = expected_of(job.crew.trainers)
        self.made.put_nowait((step + 1, optim, expected))
        if self.shared:  # the probe is work on devices that are the trainer's only inside its turn
            await asyncio.wait([expected])

    async def publish_loop(self) -> None:
        """Versions to the relay: when every rank has written its shards, replicas may load and the window opens."""
        job = self.job
        while True:
            version, optim, expected = await self.made.get()
            shards = await job.all_ranks("published", version)
            if self.permitted is not None:
                await self.permitted(version)
            job.sync.publish(shards, expected, optim)
            if self.evaluation is not None:
                self.evaluation.published(version, job.spawn)
            await job.window.publish(version)
            job.progressed()

    async def next_chunk(self, step: int) -> Claim | None:
        """The next groups of this step, None when it has all; here, and only here, the staleness law is enforced."""
        job, w = self.job, self.job.config.workflow
        law = job.window.oldest_allowed()
        while True:
            ask = self._wanted(step)
            if ask is None:
                if await self.feeder.refill(step):
                    continue
                return None
            if self.drops and not self._may_come(ask):
                await job.book.change()
                continue
            claim = await job.claim_now(
                "train",
                worker="trainer",
                timeout_s=job.dock.patience_s,
                min_version=law if w.stale == "drop" else None,
                **ask,
            )
            if claim is None:
                continue
            for group, rows, reason in claim.dropped:
                await self._dropped(int(group), len(rows), reason)
            await self._reported(claim)
            claim = self._not_held(claim)
            if len(claim.rows):
                taken = np.unique(claim.group_ids).tolist()
                for group in taken:
                    _, issue = job.book.close_group(group)
                    self.issues[group] = issue.epoch, issue.prompt_index
                self.feeder.taken += len(taken)
                return claim

    async def _reported(self, claim: Claim) -> None:
        """Wait until the scorer has said what it wrote: one that dies in between is asked for it again, which it could
        not be once the rows are trained and freed."""
        book, groups = self.job.book, np.unique(claim.group_ids).tolist()
        while any(book.knows(group) and not book.is_scored(group) for group in groups):
            await book.change()

    def _not_held(self, claim: Claim) -> Claim:
        """Without rows of groups that this step has taken: a dock pair that was started again offers them anew."""
        is_open = np.array([self.job.book.knows(g) for g in claim.group_ids.tolist()], bool)
        return claim if is_open.all() else part_of(claim, is_open)

    def _wanted(self, step: int) -> dict[str, Any] | None:
        """What to claim next: groups, how many at least, and which. None: the step has all that it can get."""
        job, w = self.job, self.job.config.workflow
        room = w.groups_per_step - self.feeder.taken
        if w.take == "ready":
            return self._wanted_of_any(step, room)
        pending = job.book.pending(step)
        if not pending or not room:
            return None
        chunk = min(self._chunk(), room, len(pending))
        # In order without lag, so that a seed fixes the sums; else what is complete first.
        wanted = pending[:chunk] if w.max_lag == 0 and w.oversample == 1 else pending
        return {"count": min(room, len(wanted)), "at_least": chunk, "group_ids": wanted}

    def _wanted_of_any(self, step: int, room: int) -> dict[str, Any] | None:
        job, w = self.job, self.job.config.workflow
        there = job.book.count()
        if not there or not room:
            return None
        due = job.book.due(step + 1 - w.max_lag) if w.stale == "drop" and w.oversample == 1 else []
        free = room - len(due)
        if free > 0:
            count = min(free, there)
            return {"count": count, "at_least": min(self._chunk(), count), "policy": "by_version"}
        due = due[:room]
        return {"count": len(due), "at_least": min(self._chunk(), len(due)), "group_ids": due}

    def _may_come(self, ask: dict[str, Any]) -> bool:
        """Whether enough of the groups are scored. What waits in the dock does not hear that a group is dropped."""
        book = self.job.book
        groups = ask.get("group_ids") or book.pending()
        return sum(map(book.is_scored, groups)) >= ask["at_least"]

    def lacks_scores(self) -> bool:
        """Whether the running step has trained all that is scored and needs more."""
        job, w = self.job, self.job.config.workflow
        pending = job.book.pending(None if w.take == "ready" else job.step)
        needs = min(w.groups_per_step - self.feeder.taken, len(pending))
        return sum(map(job.book.is_scored, pending)) < needs

    def _chunk(self) -> int:
        """Groups that are claimed at once."""
        return self.job.config.workflow.groups_per_step if self.whole else self.stream

    def describe(self) -> str:
        """What the running step has and lacks, one line for messages of the no-progress watchdog."""
        job, w = self.job, self.job.config.workflow
        open_groups = job.book.pending(None if w.take == "ready" else job.step)
        scored = sum(map(job.book.is_scored, open_groups))
        return (
            f"trainer: step {job.step} has {self.feeder.taken} of {w.groups_per_step} groups and waits for "
            f"{len(open_groups)} open ones, {scored} of them scored"
        )

    async def _dropped(self, group: int, rows: int, reason: str) -> None:
        """Too old for the law: the prompt is issued again, unless more groups than needed are issued anyway."""
        job = self.job
        job.window.dropped[reason] += rows
        job.events.note("dropped", group=group, reason=reason)
        batch, issue = job.book.close_group(group)
        if job.config.workflow.oversample == 1:
            await self.feeder.put(batch, [issue], replaces=[group])

    async def _drop_surplus(self, step: int) -> None:
        """max_lag 0: what the step left over could never be trained."""
        job = self.job
        left = job.book.pending(step)
        if not left:
            return
        job.events.note("dropped", groups=left, reason="surplus")
        job.window.dropped["surplus"] += job.book.drop_surplus(left)
        await job.dock.drop_groups(left, "surplus")  # first, or a stopped answer would be claimed again
        await self.stop_answering()

    async def _train(self, step: int, claim: Claim, rules: ChunkRules, sums: _Sums) -> None:
        """Gradients of a claim, in the chunks in which a streamed step would get its groups: the sums are the same."""
        order = np.unique(claim.group_ids)
        for first in range(0, len(order), self.stream):
            chosen = np.isin(claim.group_ids, order[first : first + self.stream])
            shown = self.job.config.observe.samples_per_step if sums.samples == 0 else 0
            await self.train_chunk(step, part_of(claim, chosen), rules, sums, shown)
        with contextlib.suppress(ClaimLost):  # a dock pair was started again: this loop alone trains its rows
            await self.job.dock.done(claim.claim_id)
        with contextlib.suppress(StaleHandle):  # or has lost its memory
            await self.job.dock.free(claim.rows)

    async def train_chunk(self, step: int, claim: Claim, rules: ChunkRules, sums: _Sums, shown: int) -> None:
        """Gradients of one chunk; `shown`: answers to print."""
        job, t = self.job, self.job.config.trainer
        infos = batcher.RowInfos(claim.rows, claim.group_ids, claim.members, claim.tokens)
        plan = batcher.plan(
            infos, t.data_parallel, t.micro_batch_tokens, t.pipeline_parallel if t.virtual_pipeline else 1
        )
        rows = claim.rows.tolist()
        versions = dict(zip(rows, zip(claim.version_min.tolist(), claim.version_max.tolist())))
        groups = dict(zip(rows, zip(claim.group_ids.tolist(), claim.members.tolist())))
        with job.recorder.busy("trainer"):
            reports, of_critic = await asyncio.gather(
                job.all_ranks("train", plan, versions, groups, rules, shown),
                self.valuing.train(plan, versions, groups, rules),
            )
        one_per_replica = [reports[i] for i in job.crew.leaders]
        trained = [r.sums for r in one_per_replica]
        rewards = np.array((await job.dock.read(claim.rows, ["reward"]))["reward"], dtype=np.float64)
        told = {"groups": groups, "versions": versions, "rewards": dict(zip(rows, rewards.tolist()))}
        job.events.note("trained", step=step, plan=plan, sums=trained, rules=rules, **told)
        issues = {row: self.issues[group] for row, group in zip(rows, claim.group_ids.tolist())}
        job.recorder.trained(step, claim, rewards, one_per_replica, issues)
        job.recorder.critic_trained(of_critic)
        job.progressed()
        sums.samples += len(claim.rows)
        sums.sequences += int(sum(s["actor/loss_sequences_count"] for s in trained))
        sums.tokens += int(sum(s["actor/loss_tokens_count"] for s in trained))

    def _count_bad(self, finish: FinishReport) -> None:
        t = self.job.config.trainer
        if not finish.optim.bad_tensor:
            self.bad_steps = 0
            return
        self.bad_steps += 1
        if self.bad_steps >= t.max_bad_steps:
            raise EngineError(
                f"the gradient of {finish.optim.bad_tensor} was not finite in {self.bad_steps} steps in a row "
                f"(trainer.max_bad_steps); lower trainer.lr or look at the samples of step {self.job.step}"
            )

    async def _after_step(self, step: int) -> None:
        job, evaluation = self.job, self.evaluation
        if evaluation is not None and evaluation.is_due(step + 1) and not evaluation.beside:
            await job.window.wait_published(step + 1)
            await evaluation.between()
        if self._is_saved(step + 1):
            await self.save(step + 1)
        if self._held or job.config.workflow.max_lag:
            await self.between.do(step + 1)
        await job.window.release()

    def _is_saved(self, version: int) -> bool:
        """Whether there is a checkpoint of `version` in the middle of the run."""
        t = self.job.config.trainer
        return bool(t.save_every and version % t.save_every == 0 and version < t.steps)


def part_of(claim: Claim, chosen: np.ndarray) -> Claim:
    """The rows of a claim at `chosen` (bool [n])."""
    per_row = ("rows", "group_ids", "members", "version_min", "version_max", "tokens")
    return replace(claim, **{name: getattr(claim, name)[chosen] for name in per_row})
