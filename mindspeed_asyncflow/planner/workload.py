"""How long prompts and answers are, and how many a step takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError

POINTS = 256  # equally likely lengths that stand for a distribution
Z95 = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts with their probabilities."""

    tokens: np.ndarray  # int64 [n], ascending, from 1
    share: np.ndarray  # float64 [n], sums to 1

    @classmethod
    def of_bins(cls, bins: Sequence[tuple[int, float]], longest: int) -> Lengths:
        """From [tokens, weight]; what is longer than `longest` is cut there. Raises `ConfigError` for no weight."""
        lengths = np.array([b[0] for b in bins], dtype=np.int64)
        weights = np.array([b[1] for b in bins], dtype=np.float64)
        if not len(bins) or lengths.min() < 1 or weights.min() < 0 or weights.sum() <= 0:
            raise ConfigError(f"workload: {list(bins)} must be [tokens from 1, weight from 0] with some weight above 0")
        tokens, where = np.unique(np.minimum(lengths, longest), return_inverse=True)
        return cls(tokens, np.bincount(where, weights) / weights.sum())

    @classmethod
    def lognormal(cls, mean: float, p95: float, longest: int) -> Lengths:
        """Log-normal by mean and 95 % quantile, before the cut at `longest`. Raises `ConfigError` for a quantile that
        no log-normal distribution has: 1 to exp(z^2 / 2) = 3.87 times the mean."""
        # ln p95 = mu + z sigma and ln mean = mu + sigma^2 / 2, so sigma^2 / 2 - z sigma + ln(p95 / mean) = 0.
        under = Z95**2 - 2 * math.log(p95 / mean)
        if p95 < mean or under < 0:
            least, most = mean, mean * math.exp(Z95**2 / 2)
            raise ConfigError(
                f"workload: a mean of {mean:g} needs a 95 % quantile of {least:g} to {most:.0f}, not {p95:g}"
            )
        sigma = Z95 - math.sqrt(under)
        mu = math.log(mean) - sigma**2 / 2
        normal = NormalDist(mu, sigma) if sigma > 0 else None
        middles = (np.arange(POINTS) + 0.5) / POINTS
        values = [math.exp(normal.inv_cdf(float(q))) if normal else mean for q in middles]
        return cls.of_bins([(max(1, round(v)), 1.0) for v in values], longest)

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int64 [count]"""
        return rng.choice(self.tokens, size=count, p=self.share)

    @property
    def mean(self) -> float:
        return float(self.tokens @ self.share)

    @property
    def mean_square(self) -> float:
        return float((self.tokens.astype(np.float64) ** 2) @ self.share)

    @property
    def biased_mean(self) -> float:
        """Mean length of the answer that a token drawn at random belongs to."""
        return self.mean_square / self.mean

    @property
    def longest(self) -> int:
        return int(self.tokens[-1])

    def quantile(self, q: float) -> int:
        """The shortest length that a share `q` does not exceed."""
        where = int(np.searchsorted(np.cumsum(self.share), q - 1e-12))
        return int(self.tokens[min(where, len(self.tokens) - 1)])

    def longest_of(self, count: int) -> float:
        """Expected longest of `count` answers."""
        below = np.cumsum(self.share) ** count
        return float(self.tokens @ np.diff(below, prepend=0.0))


@dataclass(frozen=True, slots=True)
class Workload:
    """What one step generates and trains."""

    prompt: Lengths
    answer: Lengths
    groups_per_step: int
    group_size: int

    @classmethod
    def of(cls, config: Config) -> Workload:
        w, longest = config.workload, (config.data.max_prompt_tokens, config.rollout.max_new_tokens)
        prompt = (
            Lengths.of_bins(w.prompt_bins, longest[0])
            if w.prompt_bins
            else Lengths.lognormal(w.prompt_mean, w.prompt_p95, longest[0])
        )
        answer = (
            Lengths.of_bins(w.answer_bins, longest[1])
            if w.answer_bins
            else Lengths.lognormal(w.answer_mean, w.answer_p95, longest[1])
        )
        return cls(prompt, answer, config.workflow.groups_per_step, config.algorithm.group_size)

    @property
    def samples(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def sample_tokens(self) -> float:
        """Mean tokens of a prompt with its answer."""
        return self.prompt.mean + self.answer.mean

    @property
    def sample_square(self) -> float:
        """Mean of (prompt + answer)^2, the two drawn independently."""
        return self.prompt.mean_square + 2 * self.prompt.mean * self.answer.mean + self.answer.mean_square

    @property
    def step_tokens(self) -> float:
        return self.samples * self.sample_tokens
