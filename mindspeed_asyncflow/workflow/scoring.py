"""Answers to rewards and advantages, and to log-probabilities of the frozen reference policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.client import Claim
from mindspeed_asyncflow.workflow.answering import rows_of
from mindspeed_asyncflow.workflow.job import Job


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
        report = await job.crew.scorer.score(claim.claim_id, rows_of(claim))
        job.recorder.scored(report)
        job.events.note("scored", groups=np.unique(claim.group_ids).tolist(), unscored=len(report.unscored))
        if report.unscored:
            self._drop_unscored(claim, report.unscored)
        for group in report.flat:
            rows = claim.rows[claim.group_ids == group].tolist()
            self._drop_flat(group, sum(row not in report.unscored for row in rows))
        job.book.scored(np.unique(claim.group_ids).tolist())
        job.progressed()

    def _drop_unscored(self, claim: Claim, unscored: dict[int, str]) -> None:
        """A group without any score leaves its batch: the step trains with what is left."""
        job = self.job
        job.window.dropped["unscored"] += len(unscored)
        for group in np.unique(claim.group_ids).tolist():
            if all(int(r) in unscored for r in claim.rows[claim.group_ids == group]):
                job.book.close_group(group)
                job.events.note("dropped", group=group, reason="unscored")

    def _drop_flat(self, group: int, rows: int) -> None:
        """All its rewards are equal: nothing to learn. The train loop replaces it while its step lacks groups."""
        job = self.job
        job.window.dropped["zero_variance"] += rows
        job.book.close_group(group)
        job.events.note("dropped", group=group, reason="zero_variance")

    async def reference_loop(self, index: int) -> None:
        """As `score_loop`, over the references in equal shares."""
        puts = self.reference_puts[index]
        while True:
            if puts is None:
                await self.refer(index, self.job.config.workflow.groups_per_step)
            elif groups := (await puts.get())[index :: len(self.job.crew.references)]:
                await self.refer(index, len(groups), group_ids=groups, at_least=len(groups))

    async def refer(self, index: int, groups: int, **which: Any) -> None:
        job = self.job
        claim = await job.claim("reference", groups, worker=f"reference{index}", **which)
        with job.recorder.busy(f"reference{index}"):
            busy_s = await job.crew.references[index].logprobs(claim.claim_id, rows_of(claim))
        job.recorder.referenced(busy_s)
        job.progressed()
