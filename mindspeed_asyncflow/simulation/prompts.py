"""The prompts of a simulated run: lengths, rewards and chances as functions of (seed, group, member), so that every
schedule meets the same workload whatever the order in which it asks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from mindspeed_asyncflow.planner.workload import Lengths, Workload
from mindspeed_asyncflow.simulation.dock import Truth
from mindspeed_asyncflow.workflow.book import Issue

_MEMBERS = 1 << 20


class Prompts:
    """`flat_share`: prompts whose answers all get the same reward."""

    def __init__(self, workload: Workload, seed: int, flat_share: float = 0.0) -> None:
        self.workload, self.seed, self.flat_share = workload, seed, flat_share
        self._blank = np.zeros(workload.prompt.longest, np.int32)
        self._given = 0

    def batches(self) -> Callable[[], Sequence[Issue]]:
        """The data stream of the loops; it never ends."""

        def more() -> list[Issue]:
            first, count = self._given, self.workload.groups_per_step
            self._given += count
            lengths = _of(self.workload.prompt, self.chance(np.arange(first, first + count), np.zeros(1), "prompt"))
            return [Issue(0, first + i, self._blank[:n], "") for i, n in enumerate(lengths.tolist())]

        return more

    def truth(self, group_ids: np.ndarray, members: np.ndarray) -> Truth:
        """0 or 1 as reward: of each prompt a share of its own is right, neither none nor all unless it is flat."""
        flat = self.chance(group_ids, np.zeros(1), "flat") < self.flat_share
        share = self.chance(group_ids, np.zeros(1), "difficulty")
        right = self.chance(group_ids, members, "reward") < share
        right = np.where(members == 0, True, np.where(members == 1, False, right))
        reward = np.where(flat, share > 0.5, right).astype(np.float64)
        return Truth(_of(self.workload.answer, self.chance(group_ids, members, "answer")), reward, flat)

    def chance(self, group_ids: np.ndarray, members: np.ndarray, what: str) -> np.ndarray:
        """Uniform in [0, 1), float64 [n]. Mixing steps of SplitMix64."""
        salt = np.uint64(zlib.crc32(what.encode()) << 32 | self.seed)
        number = np.asarray(group_ids).astype(np.uint64) * np.uint64(_MEMBERS) + np.asarray(members).astype(np.uint64)
        number = (number ^ salt) + np.uint64(0x9E3779B97F4A7C15)
        for _ in range(2):
            number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            number ^= number >> np.uint64(31)
        return (number >> np.uint64(11)).astype(np.float64) / (1 << 53)


def _of(lengths: Lengths, chance: np.ndarray) -> np.ndarray:
    """The lengths at these quantiles; int64 [n]."""
    where = np.searchsorted(np.cumsum(lengths.share), chance, side="right")
    return lengths.tokens[np.minimum(where, len(lengths.tokens) - 1)]
