"""Mean and variance of numbers that several processes hold, without a collective: parts merge in any order.

Whoever has nothing sends the empty part, so nobody waits for it. Merging: Chan, Golub and LeVeque (1979).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import AlgorithmConfig

WHITEN_EPS = 1e-8  # added to the variance


@dataclass(frozen=True, slots=True)
class Moments:
    """Of `count` numbers; `m2` is the sum of squared distances from their mean. No arguments: of none."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        values = np.asarray(values, dtype=np.float64)
        if not values.size:
            return cls()
        mean = float(values.mean())
        return cls(values.size, mean, float(((values - mean) ** 2).sum()))

    def merge(self, other: Moments) -> Moments:
        if not self.count or not other.count:
            return other if not self.count else self
        count, gap = self.count + other.count, other.mean - self.mean
        return Moments(
            count,
            self.mean + gap * other.count / count,
            self.m2 + other.m2 + gap * gap * self.count * other.count / count,
        )

    @property
    def variance(self) -> float:
        """Of the population; 0 of none."""
        return self.m2 / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """With Bessel's correction; 0 of fewer than two."""
        return (self.m2 / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


def rescale(algorithm: AlgorithmConfig, tokens: Moments, rewards: Moments) -> tuple[float, float]:
    """(shift, factor) such that the batch trains on (advantage - shift) * factor.

    `tokens`: of the advantages of all trained tokens; `rewards`: of all rewards of the batch. Whitening is
    (A - mean) / sqrt(variance + 1e-8); grpo_batch divides by the rewards' standard deviation + advantage_eps. Both with
    Bessel's correction.
    """
    if not algorithm.batch_level:
        return 0.0, 1.0
    if algorithm.advantage == "grpo_batch":
        return 0.0, 1.0 / (rewards.std + algorithm.advantage_eps)
    return tokens.mean, (tokens.std**2 + WHITEN_EPS) ** -0.5
