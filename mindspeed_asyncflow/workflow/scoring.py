"""Answers to rewards and advantages, and to log-probabilities of the frozen reference policy."""

from __future__ import annotations

import math
from functools import partial

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
        self._again: set[int] = set()  # groups whose scoring was broken off: some of their rows may be scored

    async def score_loop(self) -> None:
        """Whole groups only. One task at a time (`workflow.overlap` false): a whole put at once."""
        if self.puts is None:
            while True:
                groups = self.job.config.workflow.groups_per_step
                await self.score(await self.job.claim("reward", groups, worker="scorer"))
        while True:
            if put := await self.puts.get():
                await self.job.all_of("reward", put, "scorer", self.score)

    async def score(self, claim: Claim) -> bool:
        """Whether it is done; where the scorer or the claim was lost, its rows are offered again."""
        groups = np.unique(claim.group_ids).tolist()
        done = await self.job.attempt("scorer", self._score(claim, groups))
        self._again = self._again.difference(groups) if done else self._again.union(groups)
        return done

    async def _score(self, claim: Claim, groups: list[int]) -> None:
        """What the scorer writes is worth nothing before its report is here, so the claim is ended then."""
        job = self.job
        again = not self._again.isdisjoint(groups)
        with job.calling("scorer", "score"):
            report = await job.crew.scorer.score(claim.claim_id, rows_of(claim), again)
        if report.unscored or report.flat:
            await self._drop(claim, report)
        await job.dock.done(claim.claim_id)
        job.recorder.scored(report)
        unscored, flat = len(report.unscored), list(report.flat)
        job.events.note("scored", rows=members_of(claim), scores=report.scores, unscored=unscored, flat=flat)
        job.book.scored(groups)
        job.progressed()

    async def _drop(self, claim: Claim, report: ScoreReport) -> None:
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
                if job.book.knows(int(group)) and not job.book.lose(int(group), int(samples)):
                    job.book.close_group(int(group))
            if chosen.any():
                await job.dock.drop_rows(claim.rows[chosen], reason)

    async def reference_loop(self, index: int) -> None:
        """As `score_loop`, over the references in equal shares."""
        puts, references = self.reference_puts[index], len(self.job.crew.references)
        # Few at once: one reference would take what many could.
        few = math.ceil(self.job.config.workflow.groups_per_step / (4 * references))
        while True:
            if puts is None:
                await self.refer(index, await self.job.claim("reference", few, worker=f"reference{index}"))
            elif groups := (await puts.get())[index::references]:
                await self.job.all_of("reference", groups, f"reference{index}", partial(self.refer, index))

    async def refer(self, index: int, claim: Claim) -> bool:
        """As `score`."""
        return await self.job.attempt(f"reference{index}", self._refer(index, claim))

    async def _refer(self, index: int, claim: Claim) -> None:
        job = self.job
        with job.recorder.busy(f"reference{index}"), job.calling(f"reference{index}", "logprobs"):
            busy_s = await job.crew.references[index].logprobs(claim.claim_id, rows_of(claim))
        job.recorder.referenced(busy_s)
        job.progressed()
