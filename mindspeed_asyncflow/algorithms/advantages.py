"""Advantages of answers from their rewards.

A row belongs to a group by its group id, never by its position. Everything here is numpy: a batch is a few hundred
numbers, and the processes that compute advantages need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_asyncflow.errors import ConfigError, RewardError

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import AlgorithmConfig


def grpo(rewards: np.ndarray, eps: float) -> np.ndarray:
    """(r - mean) / (std + eps) of one group [G]; std with Bessel's correction (DeepSeekMath, arXiv 2402.03300)."""
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + eps)


def dr_grpo(rewards: np.ndarray, eps: float) -> np.ndarray:
    """r - mean of one group [G] (Dr. GRPO, arXiv 2503.20783): hard and easy prompts weigh the same; eps is unused."""
    return rewards - rewards.mean()


def grpo_loo(rewards: np.ndarray, eps: float) -> np.ndarray:
    """(r_i - mean of the others) / (std of the group + eps)."""
    return rloo(rewards, eps) / (rewards.std(ddof=1) + eps)


def rloo(rewards: np.ndarray, eps: float) -> np.ndarray:
    """r_i - mean of the others = G / (G - 1) (r_i - mean) (RLOO, arXiv 2402.14740); eps is unused."""
    return dr_grpo(rewards, eps) * len(rewards) / (len(rewards) - 1)


def maxrl(rewards: np.ndarray, eps: float) -> np.ndarray:
    """(r - mean) / (mean + eps): rare successes weigh more (MaxRL). For rewards that are not negative."""
    return dr_grpo(rewards, eps) / (rewards.mean() + eps)


ADVANTAGES: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "grpo": grpo,
    "grpo_batch": dr_grpo,  # divided by the standard deviation of the batch when that is known: moments.py
    "grpo_loo": grpo_loo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce_pp_baseline": dr_grpo,  # whitened over the batch: moments.py
}
ALONE = ("reinforce_pp", "gae")  # the reward itself: answers are not compared, a group may have one


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of a set of rows, in the order in which the rows were given."""

    values: np.ndarray  # float64 [N]; 0 where not `kept`
    kept: np.ndarray  # bool [N]; False: the row must not be trained on
    rows_without_reward: int
    groups: int  # distinct ids, before anything was left out
    groups_dropped: int  # of these, too few rewards left to compare (fewer than two)
    groups_without_signal: int  # of these, all rewards equal: advantage exactly 0


def group_advantages(
    rewards: Sequence[float | None] | np.ndarray, group_ids: Sequence[int] | np.ndarray, cfg: AlgorithmConfig
) -> GroupAdvantages:
    """Advantage of each row inside its own group; `rewards` and `group_ids` are parallel, in any order.

    A reward of None or NaN (abstained, failed, timed out) leaves its row out; the survivors are compared with each
    other. A group with one survivor is dropped, as nothing can be compared; with `group_size: 1` the advantage is 0.
    Rows of a group whose rewards are all equal get exactly 0 and stay: they add no policy gradient, but count in the
    loss denominator and, with a reference, feel the KL term. Raises `RewardError` for an infinite reward, and where
    maxrl gets negative ones.
    """
    values = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    ids = np.asarray(group_ids)
    if values.shape != ids.shape:
        raise RewardError(f"{len(values)} rewards but {len(ids)} group ids")
    if np.isinf(values).any():
        row = int(np.flatnonzero(np.isinf(values))[0])
        raise RewardError(
            f"reward of row {row} (group {ids[row]}) is {values[row]}; scorers must return finite numbers"
        )
    alone = cfg.advantage in ALONE
    estimate = (lambda rewards, eps: rewards) if alone else _registered(cfg.advantage)
    if cfg.advantage == "maxrl" and (values < 0).any():
        raise RewardError(f"algorithm.advantage maxrl divides by the mean reward; one is {np.nanmin(values):g}")
    scored = ~np.isnan(values)
    kept = scored.copy()
    advantages = np.zeros_like(values)
    dropped = without_signal = 0
    unique = np.unique(ids)
    for group in unique:
        rows = np.flatnonzero((ids == group) & scored)
        if len(rows) == 0 or (len(rows) == 1 and cfg.group_size > 1 and not alone):
            kept[rows] = False
            dropped += 1
            continue
        flat = np.ptp(values[rows]) == 0
        without_signal += bool(flat)
        if alone or not flat:
            advantages[rows] = estimate(values[rows], cfg.advantage_eps)
    return GroupAdvantages(advantages, kept, int((~scored).sum()), len(unique), dropped, without_signal)


def _registered(name: str) -> Callable[[np.ndarray, float], np.ndarray]:
    if name not in ADVANTAGES:
        raise ConfigError(f"algorithm.advantage {name!r} is unknown; there are: {', '.join(ADVANTAGES)}")
    return ADVANTAGES[name]
