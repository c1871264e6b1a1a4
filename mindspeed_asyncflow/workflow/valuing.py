"""Rewards to advantages by the critic, and the critic's part of a step.

The critic has the trainer's parallel sizes, so the plan of a chunk fits both. All of its ranks get one call after the
other. Values of answers that step k trains come, without lag, from the critic that step k-1 has left, chunk by chunk in
issue order, so that a seed fixes every bit; with lag they come from the critic of the moment at which they are scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_asyncflow.dock.client import Claim
from mindspeed_asyncflow.errors import EngineError
from mindspeed_asyncflow.workflow import batcher
from mindspeed_asyncflow.workflow.job import Job
from mindspeed_asyncflow.workflow.train_worker import ChunkReport, ChunkRules, FinishReport


class Valuing:
    def __init__(self, job: Job) -> None:
        self.job = job
        w, t = job.config.workflow, job.config.trainer
        self.there = bool(job.crew.critics)
        self.puts = job.book.follow() if self.there and w.max_lag == 0 else None
        self.few = t.stream_groups or max(1, w.groups_per_step // 4)
        self.warmup = job.config.critic.warmup_steps if self.there else 0
        self.bad_steps = 0
        self._tokens = 0  # of the running step that the value loss counts
        self._turn = asyncio.Lock()

    async def value_loop(self) -> None:
        """Whole groups as they are scored; without lag in issue order, in chunks of fixed size."""
        if self.puts is None:
            while True:
                await self.value(await self.job.claim("value", self.few, worker="critic"))
        while True:
            groups = await self.puts.get()
            for first in range(0, len(groups), self.few):
                chosen = await self._scored(groups[first : first + self.few])
                if chosen:
                    await self.job.all_of("value", chosen, "critic", self.value)

    async def _scored(self, groups: Sequence[int]) -> list[int]:
        """Those of `groups` that scoring has left, when all are scored."""
        book = self.job.book
        while any(book.is_open(g) and not book.is_scored(g) for g in groups):
            await book.change()
        return [g for g in groups if book.is_open(g)]

    async def value(self, claim: Claim) -> bool:
        """Whether it is done; where the claim was lost, its rows are offered again."""
        return await self.job.attempt("critic", self._value(claim))

    async def _value(self, claim: Claim) -> None:
        job, t = self.job, self.job.config.trainer
        infos = batcher.RowInfos(claim.rows, claim.group_ids, claim.members, claim.tokens)
        plan = batcher.plan(
            infos, t.data_parallel, t.micro_batch_tokens, t.pipeline_parallel if t.virtual_pipeline else 1
        )
        of_rows = dict(zip(claim.rows.tolist(), zip(claim.group_ids.tolist(), claim.members.tolist())))
        busy_s = await self._all_ranks("value", claim.claim_id, plan, of_rows)
        await job.dock.done(claim.claim_id)
        job.recorder.valued(max(busy_s))
        job.progressed()

    async def train(
        self,
        plan: list[list[list[int]]],
        versions: Mapping[int, tuple[int, int]],
        groups: Mapping[int, tuple[int, int]],
        rules: ChunkRules,
    ) -> list[ChunkReport]:
        """Of one rank of every replica; none without a critic."""
        if not self.there:
            return []
        reports = await self._all_ranks("train", plan, versions, groups, rules)
        found = [reports[i] for i in self.job.crew.leaders]
        self._tokens += int(sum(report.sums["critic/tokens_count"] for report in found))
        return found

    async def finish(self, version: int) -> FinishReport | None:
        """The critic's optimizer step; None without a critic. Raises EngineError after `trainer.max_bad_steps`."""
        if not self.there:
            return None
        tokens, self._tokens = self._tokens, 0
        (report, *_) = await self._all_ranks("finish", version, tokens)
        bad, limit = report.optim.bad_tensor, self.job.config.trainer.max_bad_steps
        self.bad_steps = self.bad_steps + 1 if bad else 0
        if self.bad_steps >= limit:
            raise EngineError(
                f"the critic's gradient of {bad} was not finite in {self.bad_steps} steps in a row "
                f"(trainer.max_bad_steps); lower critic.lr or look at the samples of step {self.job.step}"
            )
        return report

    async def _all_ranks(self, method: str, *args: Any) -> list[Any]:
        async with self._turn:
            with self.job.recorder.busy("critic"):
                return await self.job.of_all("critic", self.job.crew.critics, method, args)
