"""Policy losses per token: functions of log-probabilities [T] and advantages [T], of any float dtype.

`logprobs` carries the gradient; `old` is the log-probability under the proximal policy and carries none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mindspeed_asyncflow.algorithms.safe_exp import safe_exp
from mindspeed_asyncflow.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import AlgorithmConfig

RATIO_CAP = 20.0  # nats of log-ratio beyond which a ratio grows linearly


@dataclass(frozen=True, slots=True)
class TokenLoss:
    loss: torch.Tensor  # [T]
    ratio: torch.Tensor  # [T], no gradient
    clipped: torch.Tensor  # bool [T]: the clipped term is the one that counts
    clipped_lower: torch.Tensor  # bool [T]: the dual-clip bound is the one that counts


def ppo_clip(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, cfg: AlgorithmConfig) -> TokenLoss:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347; unequal bounds: DAPO).

    With `dual_clip` c the loss of negative advantages is at most -c A (arXiv 1912.09729).
    """
    ratio = safe_exp(logprobs - old, RATIO_CAP)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    clipped_lower = torch.zeros_like(clipped)
    if cfg.dual_clip is not None:
        ceiling = -advantages * cfg.dual_clip
        clipped_lower = (advantages < 0) & (loss > ceiling)
        loss = torch.where(clipped_lower, ceiling, loss)
    return TokenLoss(loss, ratio.detach(), clipped, clipped_lower)


def reinforce(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, cfg: AlgorithmConfig) -> TokenLoss:
    """-A log pi. The ratio is reported but has no part in the gradient."""
    nothing = torch.zeros_like(logprobs, dtype=torch.bool)
    ratio = safe_exp(logprobs.detach() - old, RATIO_CAP)
    return TokenLoss(-advantages * logprobs, ratio, nothing, nothing)


LossFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "AlgorithmConfig"], TokenLoss]
LOSSES: dict[str, LossFn] = {"ppo_clip": ppo_clip, "reinforce": reinforce}


def registered_loss(name: str) -> LossFn:
    if name not in LOSSES:
        raise ConfigError(f"algorithm.loss {name!r} is unknown; there are: {', '.join(LOSSES)}")
    return LOSSES[name]


def truncated_weight(old: torch.Tensor, rollout: torch.Tensor, cap: float) -> torch.Tensor:
    """min(old / rollout, cap) per token, no gradient: truncated importance sampling. Log-probabilities [T] in."""
    return safe_exp((old - rollout).detach(), RATIO_CAP).clamp(max=cap)
