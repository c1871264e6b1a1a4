"""Prompts into the dock: how many are issued for a step, when, and in place of what was dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.observe.trace import get_tracer
from mindspeed_asyncflow.records import PromptRow
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.given import Given
from mindspeed_asyncflow.workflow.job import Job

NOBODY = -1  # in the place of the replica where answers came about outside the run
LOOK_AGAIN_S = 1.0  # what leaves dock and book in this very moment is in neither by then


class Feeder:
    """`batches()` gives the prompts of one batch, None at the end of the data; `ready(count)`, where prompts
    come from outside, waits until so many are there or no more will come."""

    def __init__(
        self,
        job: Job,
        batches: Callable[[], Sequence[Issue] | None],
        ready: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.job, self.batches, self.ready = job, batches, ready
        self._left: list[Issue] = []  # taken from the data and not issued yet
        self._replaced: dict[int, int] = {}  # prompts that the running step has issued in place of dropped groups
        self.taken = 0  # groups that the running step has trained so far
        self.next_batch = 0  # whose prompts are taken from the data next

    async def feed_loop(self) -> None:
        """One batch at a time, as far ahead as the window allows."""
        job = self.job
        while (batch := self.next_batch) < job.config.trainer.steps:
            await self._wait()
            await job.window.wait_to_issue(batch)  # last: who holds the window keeps every prompt back
            issues = self._take(self._size())
            if issues is None:
                break
            self.next_batch += 1
            await self.put(batch, issues)
        job.book.end()

    async def _wait(self) -> None:
        """Until a whole batch is there. A step does not wait for prompts in place of dropped ones: whoever gives them
        may wait for the step."""
        if self.ready is not None and (lacks := self._size() - len(self._left)) > 0:
            await self.ready(lacks)

    @property
    def holds(self) -> int:
        """Prompts that are taken from the data and not issued yet."""
        return len(self._left)

    def _size(self) -> int:
        """Groups of the next batch: what earlier steps left over is not issued again."""
        step = self.job.config.groups_issued_per_step
        if step == self.job.config.workflow.groups_per_step:
            return step
        return min(step, self.job.config.most_groups_open - self.job.book.count() - self.taken)

    def _take(self, count: int) -> list[Issue] | None:
        """The next prompts; None at the end of the data. A batch that the data makes short stays short."""
        if not self._left and count == self.job.config.workflow.groups_per_step:
            batch = self.batches()
            return None if batch is None else list(batch)
        taken = self._take_some(count)
        return taken if taken or count <= 0 else None

    def _take_some(self, count: int) -> list[Issue]:
        while len(self._left) < count:
            batch = self.batches()
            if batch is None:
                break
            self._left += batch
        count = max(count, 0)
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    async def put(self, batch: int, issues: Sequence[Issue], replaces: Sequence[int] = ()) -> None:
        """`replaces`: for each prompt the dropped group that it is issued again for; none where all are new."""
        job = self.job
        issues = [self._young(issue) for issue in issues]
        groups = job.book.make_groups(batch, issues)
        ids = [group[0].group_id for group in groups]
        prompts = [[issue.epoch, issue.prompt_index] for issue in issues]
        # With the book and before any wait: whoever saves the book saves the same of both.
        job.events.note("issued", batch=batch, groups=ids, prompts=prompts, replaces=list(replaces))
        for group, issue in zip(groups, issues):
            if issue.given is not None:
                self._answered(group, issue.given)
        with get_tracer().span("feed/put", lane="feed", step=batch, groups=len(groups)):
            if groups:
                await job.dock.put_groups(groups)
        job.window.issued += sum(len(g) for g in groups)
        job.book.add(batch, groups)
        job.progressed()

    def _young(self, issue: Issue) -> Issue:
        """Without answers that the law lets nobody train any more: the run answers the prompt itself."""
        old = issue.given is not None and issue.given.oldest < self.job.window.oldest_allowed()
        return replace(issue, given=None) if old else issue

    def _answered(self, group: Sequence[PromptRow], given: Given) -> None:
        """The group comes with its answers."""
        job, since = self.job, given.oldest
        job.book.sampled([group[0].group_id], since)
        rows = [[row.group_id, row.member] for row in group]
        job.events.note("answering", replica=NOBODY, since=since, rows=rows)

    async def issue_again(self) -> None:
        """Prompts of open groups that the dock does not have, since a pair has lost its memory, in new groups."""
        job = self.job
        first = await job.dock.missing(job.book.pending())
        await asyncio.sleep(LOOK_AGAIN_S)
        lost = await job.dock.missing([g for g in first if job.book.is_open(g)])
        found: dict[int, list[tuple[int, Issue]]] = {}  # by batch
        for group in filter(job.book.is_open, lost):
            samples = job.book.lose(group, 0)
            job.window.dropped["dock_lost"] += samples
            job.events.note("dropped", group=group, samples=samples, reason="dock_lost")
            batch, issue = job.book.close_group(group)
            found.setdefault(batch, []).append((group, issue))
        if lost:
            said = "the dock has lost the groups %s; their prompts are issued again"
            get_logger("workflow").warning(said, ", ".join(map(str, lost)))
        for batch, pairs in found.items():
            groups, issues = zip(*pairs)
            await self.put(batch, issues, replaces=groups)

    def missing(self, step: int) -> int:
        """Groups that `step` lacks, as far as it may still replace some; 0: it goes short, or lacks none."""
        w = self.job.config.workflow
        if not self.job.config.algorithm.dynamic_sampling:
            return 0
        lacks = w.groups_per_step - self.taken - self.job.book.count(step)
        left = w.max_refills * w.groups_per_step - self._replaced.get(step, 0)
        return max(0, min(lacks, left))

    async def refill(self, step: int) -> bool:
        """Prompts in place of groups that `step` has lost without training them; False: none."""
        missing = self.missing(step)
        issues = self._take_some(missing)
        if not issues:
            if missing:
                self.job.recorder.data_short(step)
            return False
        self._replaced = {step: self._replaced.get(step, 0) + len(issues)}  # earlier steps are over
        await self.put(step, issues)
        return True

    def state(self) -> dict[str, Any]:
        """Between two steps, as JSON values; the position of the data itself is not in it."""
        left = [[issue.epoch, issue.prompt_index] for issue in self._left]
        return {"next_batch": self.next_batch, "left": left, "replaced": list(self._replaced.items())}

    def restore(self, state: Mapping[str, Any], issue_of: Callable[[int, int], Issue]) -> None:
        self.next_batch = state["next_batch"]
        self._left = [issue_of(epoch, index) for epoch, index in state["left"]]
        self._replaced = dict(state["replaced"])
