"""Answers to rewards and advantages, and to log-probabilities of the frozen reference policy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.client import Claim
from mindspeed_asyncflow.workflow.answering import members_of, rows_of
from mindspeed_asyncflow.workflow.job import Job
from mindspeed_asyncflow.workflow.score_worker import ScoreReport


class Scoring:
    def __init__(self, job: Job) -> None:
        self.job = job
        at_once = not job.config.workflow.overlap
        self.puts = job.book.follow() if at_once else None
        self.reference_puts = [job.book.follow() if at_once else None for _ in job.crew.references]

    async def score_loop(self) -> None:
        """Whole groups only. One task at a time (`workflow.overlap` false): a whole put at once."""
        if self.puts is None:
            while True:
                await self.score(self.job.config.workflow.groups_per_step)
        while True:
            groups = await self.puts.get()
            if groups:
                await self.score(len(groups), group_ids=groups, at_least=len(groups))

    async def score(self, groups: int, **which: Any) -> None:
        job = self.job
        claim = await job.claim("reward", groups, worker="scorer", **which)
        with job.calling("scorer", "score"):
            report = await job.crew.scorer.score(claim.claim_id, rows_of(claim))
        job.recorder.scored(report)
        unscored, flat = len(report.unscored), list(report.flat)
        job.events.note("scored", rows=members_of(claim), scores=report.scores, unscored=unscored, flat=flat)
        if report.unscored or report.flat:
            self._count_dropped(claim, report)
        job.book.scored(np.unique(claim.group_ids).tolist())
        job.progressed()

    def _count_dropped(self, claim: Claim, report: ScoreReport) -> None:
        """A group without any score leaves its batch, which trains with what is left; one whose rewards are all equal
        leaves it too, and is replaced while its step lacks groups. What was surplus meanwhile is counted as that."""
        job, dropped = self.job, self.job.window.dropped
        unscored = np.isin(claim.rows, list(report.unscored))
        flat = np.isin(claim.group_ids, report.flat) & ~unscored
        for reason, chosen in (("unscored", unscored), ("zero_variance", flat)):
            for group, samples in zip(*np.unique(claim.group_ids[chosen], return_counts=True)):
                if int(group) in job.book.surplus:
                    continue
                dropped[reason] += int(samples)
                job.events.note("dropped", group=int(group), samples=int(samples), reason=reason)
                if job.book.is_open(int(group)) and not job.book.lose(int(group), int(samples)):
                    job.book.close_group(int(group))

    async def reference_loop(self, index: int) -> None:
        """As `score_loop`, over the references in equal shares."""
        puts, references = self.reference_puts[index], len(self.job.crew.references)
        # Few at once: one reference would take what many could.
        few = math.ceil(self.job.config.workflow.groups_per_step / (4 * references))
        while True:
            if puts is None:
                await self.refer(index, few)
            elif groups := (await puts.get())[index::references]:
                await self.refer(index, len(groups), group_ids=groups, at_least=len(groups))

    async def refer(self, index: int, groups: int, **which: Any) -> None:
        job = self.job
        claim = await job.claim("reference", groups, worker=f"reference{index}", **which)
        with job.recorder.busy(f"reference{index}"), job.calling(f"reference{index}", "logprobs"):
            busy_s = await job.crew.references[index].logprobs(claim.claim_id, rows_of(claim))
        job.recorder.referenced(busy_s)
        job.progressed()
