"""Which prompt groups belong to which step, and what became of them: the driver's small bookkeeping.

Batch j holds the prompt groups that step j trains on. A group leaves its batch by being trained or dropped; a dropped
one whose prompt should be tried again comes back as a new group of the same batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.records import PromptRow


@dataclass(frozen=True, slots=True)
class Issue:
    """One prompt, as the data stream hands it out."""

    epoch: int
    prompt_index: int
    prompt_ids: np.ndarray  # int32 [P]
    truth: str


class StepBook:
    """Open groups by batch. Lives in the driver's event loop."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.next_group = 0
        self.epoch = 0
        self._issues: dict[int, Issue] = {}  # by open group
        self._batch_of: dict[int, int] = {}
        self._pending: dict[int, set[int]] = {}  # by batch
        self._batches = 0
        self._ended = False
        self._changed = asyncio.Condition()

    def make_groups(self, batch: int, issues: Sequence[Issue]) -> list[list[PromptRow]]:
        """Rows of new groups of `batch`, with the next group ids."""
        groups = []
        for issue in issues:
            group_id = self.next_group
            self.next_group += 1
            self._issues[group_id], self._batch_of[group_id] = issue, batch
            groups.append(
                [
                    PromptRow(
                        group_id, m, self.group_size, issue.prompt_ids, issue.truth, issue.epoch, issue.prompt_index
                    )
                    for m in range(self.group_size)
                ]
            )
        return groups

    async def add(self, batch: int, groups: Sequence[Sequence[PromptRow]]) -> None:
        """The dock holds these groups of `batch` now."""
        async with self._changed:
            pending = self._pending.setdefault(batch, set())
            for group in groups:
                pending.add(group[0].group_id)
                self.epoch = max(self.epoch, group[0].epoch)
            self._batches = max(self._batches, batch + 1)
            self._changed.notify_all()

    async def end(self) -> None:
        """No further batch will come."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def wait_for_batch(self, batch: int) -> bool:
        """True once `batch` is issued, False if the data ended before it."""
        async with self._changed:
            await self._changed.wait_for(lambda: batch < self._batches or self._ended)
        return batch < self._batches

    def pending(self, batch: int) -> list[int]:
        """Group ids of `batch` that are neither trained nor dropped, in issue order."""
        return sorted(self._pending.get(batch, ()))

    def last_batch(self, group_ids: Sequence[int]) -> int:
        """Newest batch of these groups, those that have left it not counted; 0 where none is left."""
        return max((self._batch_of.get(g, 0) for g in group_ids), default=0)

    def close_group(self, group_id: int) -> tuple[int, Issue]:
        """The group is trained or dropped; returns its batch and prompt."""
        batch = self._batch_of.pop(group_id)
        self._pending[batch].discard(group_id)
        return batch, self._issues.pop(group_id)

    def open_batches(self) -> Iterator[tuple[int, int]]:
        """(batch, open groups) for messages."""
        return ((b, len(g)) for b, g in sorted(self._pending.items()) if g)
