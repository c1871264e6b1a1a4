"""Rewards per token, returns and generalised advantage estimation, in numpy float64.

Tokens where the mask is 0 were not sampled by the policy: they get 0, and what comes after them is carried over them.
"""

from __future__ import annotations

import numpy as np


def token_rewards(reward: float, kl: np.ndarray | None, kl_coef: float, mask: np.ndarray) -> np.ndarray:
    """[L] rewards of the tokens of an answer: -kl_coef x kl of each, and `reward` on the last sampled one.

    `kl` [L] or None; `mask` [L]. An answer without a sampled token has no rewards.
    """
    sampled = np.asarray(mask) > 0
    rewards = np.zeros(len(sampled))
    if kl is not None:
        rewards = np.where(sampled, -kl_coef * np.asarray(kl, np.float64), 0.0)
    if sampled.any():
        rewards[np.flatnonzero(sampled)[-1]] += reward
    return rewards


def returns_to_go(rewards: np.ndarray, gamma: float, mask: np.ndarray | None = None) -> np.ndarray:
    """[L] R_t = r_t + gamma R_{t+1}."""
    sampled = np.ones(len(rewards), bool) if mask is None else np.asarray(mask) > 0
    returns = np.zeros(len(rewards))
    after = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        if sampled[t]:
            after = returns[t] = rewards[t] + gamma * after
    return returns


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages [L], returns [L]): d_t = r_t + gamma V_{t+1} - V_t, A_t = d_t + gamma lam A_{t+1}, R_t = A_t + V_t
    (Schulman et al., arXiv 1506.02438); the value after the last token is 0."""
    sampled = np.asarray(mask) > 0
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    next_value = next_advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        if not sampled[t]:
            continue
        value = float(values[t])
        delta = float(rewards[t]) + gamma * next_value - value
        next_advantage = advantages[t] = delta + gamma * lam * next_advantage
        returns[t] = next_advantage + value
        next_value = value
    return advantages, returns
