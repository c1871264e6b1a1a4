"""Which prompt groups are open, for which step they were issued, and what became of them: the driver's bookkeeping.

Batch j holds the prompt groups that were issued for step j. A group leaves the book by being trained or dropped; a
dropped one whose prompt should be tried again comes back as a new group of the same batch. What a step leaves over
(oversampling) stays open: steps after it may train it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.records import PromptRow
from mindspeed_asyncflow.workflow.given import Given


@dataclass(frozen=True, slots=True)
class Issue:
    """One prompt, as the data stream hands it out."""

    epoch: int
    prompt_index: int
    prompt_ids: np.ndarray  # int32 [P]
    truth: str
    fields: str = "{}"  # JSON object for scorers and environments
    given: Given | None = None  # its answers, where they came about outside the run


@dataclass(slots=True)
class OpenGroup:
    batch: int
    issue: Issue
    sampled: int | None = None  # oldest version that may have sampled a token of it; None: not begun
    scored: bool = False
    left: int = 0  # samples that may still be trained


class StepBook:
    """Open groups by batch. Lives in the driver's event loop."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.next_group = 0
        self.epoch = 0
        self.surplus: set[int] = set()  # groups that the newest step has left over and dropped
        self._followers: list[asyncio.Queue[list[int]]] = []
        self._groups: dict[int, OpenGroup] = {}  # in issue order
        self._put: set[int] = set()  # those that the dock holds
        self._open: Counter[int] = Counter()  # put groups by batch
        self._batches = 0
        self._ended = False
        self._news = asyncio.Event()  # set, and replaced, at every change

    def make_groups(self, batch: int, issues: Sequence[Issue]) -> list[list[PromptRow]]:
        """Rows of new groups of `batch`, with the next group ids."""
        groups = []
        for issue in issues:
            group_id = self.next_group
            self.next_group += 1
            self._groups[group_id] = OpenGroup(batch, issue, left=self.group_size)
            rows = range(self.group_size)
            groups.append([self._row(group_id, member, issue) for member in rows])
        return groups

    def _row(self, group_id: int, member: int, issue: Issue) -> PromptRow:
        return PromptRow(
            group_id,
            member,
            self.group_size,
            issue.prompt_ids,
            issue.truth,
            issue.epoch,
            issue.prompt_index,
            issue.fields,
            None if issue.given is None else issue.given.answers[member],
        )

    def add(self, batch: int, groups: Sequence[Sequence[PromptRow]]) -> None:
        """The dock holds these groups of `batch`, but those that have left the book before this was known."""
        ids = [group[0].group_id for group in groups if group[0].group_id in self._groups]
        self._put.update(ids)
        self._open[batch] += len(ids)
        self.epoch = max([self.epoch, *(group[0].epoch for group in groups)])
        for follower in self._followers:
            follower.put_nowait(ids)
        self._batches = max(self._batches, batch + 1)
        self.tell()

    def end(self) -> None:
        """No further batch will come."""
        self._ended = True
        self.tell()

    @property
    def ended(self) -> bool:
        """No further batch will come."""
        return self._ended

    def has(self, batch: int) -> bool:
        """Whether `batch` is issued."""
        return batch < self._batches

    async def change(self) -> None:
        """Wait until something about the groups changes."""
        await self._news.wait()

    async def wait_for_batch(self, batch: int) -> bool:
        """True once `batch` is issued, False if the data ended before it."""
        while not (self.has(batch) or self._ended):
            await self.change()
        return self.has(batch)

    def follow(self) -> asyncio.Queue[list[int]]:
        """The groups of every put from now on, in order."""
        self._followers.append(asyncio.Queue())
        return self._followers[-1]

    def pending(self, batch: int | None = None) -> list[int]:
        """Put groups of batches up to `batch` (None: of all) that are open, in issue order."""
        newest = self._batches if batch is None else batch
        return [g for g, opened in self._groups.items() if opened.batch <= newest and g in self._put]

    def count(self, batch: int | None = None) -> int:
        """How many groups `pending` has."""
        if batch is None:
            return len(self._put)
        return sum(n for b, n in self._open.items() if b <= batch)

    def sampled(self, group_ids: Sequence[int], version: int) -> None:
        """A replica that serves at least `version` begins to answer these groups; what began earlier keeps its mark."""
        for group in group_ids:
            opened = self._groups.get(group)
            if opened is not None and opened.sampled is None:
                opened.sampled = version

    def due(self, oldest_next: int) -> list[int]:
        """Groups that the next step could not train any more, as it takes nothing older than `oldest_next`."""
        marked = ((g, opened.sampled) for g, opened in self._groups.items() if g in self._put)
        return [g for g, sampled in marked if sampled is not None and sampled < oldest_next]

    def last_batch(self, group_ids: Sequence[int]) -> int:
        """Newest batch of these groups, those that have left the book not counted; 0 where none is left."""
        return max((self._groups[g].batch for g in group_ids if g in self._groups), default=0)

    def close_group(self, group_id: int) -> tuple[int, Issue]:
        """The group is trained or dropped; returns its batch and prompt."""
        opened = self._groups.pop(group_id)
        self.tell()
        if group_id in self._put:  # the news of its put may come after those of what became of it
            self._put.discard(group_id)
            self._open[opened.batch] -= 1
            if not self._open[opened.batch]:
                del self._open[opened.batch]
        return opened.batch, opened.issue

    def is_open(self, group_id: int) -> bool:
        """Neither trained nor dropped, and in the dock."""
        return group_id in self._put

    def knows(self, group_id: int) -> bool:
        """Neither trained nor dropped; perhaps on its way into the dock."""
        return group_id in self._groups

    def scored(self, group_ids: Sequence[int]) -> None:
        """These groups may be trained."""
        for group in group_ids:
            if group in self._groups:
                self._groups[group].scored = True
        self.tell()

    def is_scored(self, group_id: int) -> bool:
        return self._groups[group_id].scored

    def tell(self) -> None:
        """Who waits for a change looks again."""
        self._news.set()
        self._news = asyncio.Event()

    def lose(self, group_id: int, samples: int) -> int:
        """Some samples of a group are dropped; returns how many it has left, 0 also for one that has left the book."""
        if group_id not in self._groups:
            return 0
        opened = self._groups[group_id]
        opened.left -= samples
        return opened.left

    def drop_surplus(self, group_ids: Sequence[int]) -> int:
        """A step is complete without these groups, and none after it can train them; returns their samples."""
        self.surplus = set(group_ids)
        samples = sum(self._groups[group].left for group in group_ids)
        for group in group_ids:
            self.close_group(group)
        return samples

    def open_groups(self) -> list[int]:
        """All that are neither trained nor dropped, those on their way into the dock too, in issue order."""
        return list(self._groups)

    def open_batches(self) -> Iterator[tuple[int, int]]:
        """(batch, open groups) for messages."""
        return iter(sorted(self._open.items()))

    # ---- across a restart --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """As JSON values, prompts by epoch and index. What the dock knows of the groups is not in it."""
        groups = [[g, o.batch, o.issue.epoch, o.issue.prompt_index, o.left] for g, o in self._groups.items()]
        return {"next_group": self.next_group, "epoch": self.epoch, "batches": self._batches, "groups": groups}

    def restore(self, state: Mapping[str, Any], issue_of: Callable[[int, int], Issue]) -> dict[int, list[PromptRow]]:
        """The groups that were open, with their rows, for whom the dock has lost; `add` them when the dock has them.

        `issue_of(epoch, index)` gives a prompt.
        """
        self.next_group, self.epoch, self._batches = state["next_group"], state["epoch"], state["batches"]
        rows = {}
        for group, batch, epoch, index, left in state["groups"]:
            issue = issue_of(epoch, index)
            self._groups[group] = OpenGroup(batch, issue, left=left)
            rows[group] = [self._row(group, member, issue) for member in range(self.group_size)]
        return rows

    def found(self, group_id: int, left: int, sampled: int | None, scored: bool) -> int:
        """What the dock has of a restored group; returns how many samples fewer that is than the book had."""
        opened = self._groups[group_id]
        fewer = opened.left - left
        opened.left, opened.sampled, opened.scored = left, sampled, scored
        return fewer

    def batch_of(self, group_id: int) -> int:
        return self._groups[group_id].batch

    def given(self, group_id: int) -> Given | None:
        """The answers of a group that came about outside the run."""
        return self._groups[group_id].issue.given if group_id in self._groups else None
