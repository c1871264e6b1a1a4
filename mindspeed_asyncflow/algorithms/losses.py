"""Policy losses per token: functions of a `Tokens` and the settings, of any float dtype.

A loss of whole answers (gspo, gmpo) gives every token of an answer the same value, so that the mean over tokens inside
each answer is the value of the answer. Formulas, sources and conventions: docs/algorithms.md.
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


class Answers:
    """Which of N tokens belong to which of S answers."""

    def __init__(self, index: torch.Tensor, count: int) -> None:
        self.index, self.count = index, count  # int [N], 0 .. S-1
        self._tokens: torch.Tensor | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [S]"""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [S], 0 for an answer without a token."""
        if self._tokens is None:
            self._tokens = self.sum(torch.ones_like(values)).clamp(min=1)
        return self.sum(values) / self._tokens

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[S] -> [N]"""
        return values.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N trained tokens of a micro-batch of whole answers."""

    logprobs: torch.Tensor  # [N] of the policy that is trained, with gradient
    old: torch.Tensor  # [N] of the proximal policy, no gradient
    advantages: torch.Tensor  # [N]
    answers: Answers


@dataclass(frozen=True, slots=True)
class TokenLoss:
    loss: torch.Tensor  # [N]
    ratio: torch.Tensor  # [N], no gradient
    clipped: torch.Tensor  # bool [N]: the bound is what counts
    clipped_lower: torch.Tensor  # bool [N]: the dual-clip bound is what counts


def ppo_clip(t: Tokens, cfg: AlgorithmConfig) -> TokenLoss:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347; unequal bounds: DAPO).

    With `dual_clip` c the loss of negative advantages is at most -c A (arXiv 1912.09729).
    """
    return _clipped(safe_exp(t.logprobs - t.old, RATIO_CAP), t.advantages, cfg)


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, cfg: AlgorithmConfig) -> TokenLoss:
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    clipped_lower = torch.zeros_like(clipped)
    if cfg.dual_clip is not None and cfg.loss == "ppo_clip":
        ceiling = -advantages * cfg.dual_clip
        clipped_lower = (advantages < 0) & (loss > ceiling)
        loss = torch.where(clipped_lower, ceiling, loss)
    return TokenLoss(loss, ratio.detach(), clipped, clipped_lower)


def gspo(t: Tokens, cfg: AlgorithmConfig) -> TokenLoss:
    """PPO's clip of the answer's ratio s = exp(mean over its tokens of log ratio) (GSPO, arXiv 2507.18071)."""
    mean = t.answers.mean(t.logprobs - t.old)
    return _clipped(t.answers.spread(safe_exp(mean, RATIO_CAP)), t.advantages, cfg)


def gspo_token(t: Tokens, cfg: AlgorithmConfig) -> TokenLoss:
    """GSPO-token: ratio sg[s] pi / sg[pi], so that each token has its own gradient and may have its own advantage."""
    mean = t.answers.mean((t.logprobs - t.old).detach())
    ratio = t.answers.spread(safe_exp(mean, RATIO_CAP)) * torch.exp(t.logprobs - t.logprobs.detach())
    return _clipped(ratio, t.advantages, cfg)


def gmpo(t: Tokens, cfg: AlgorithmConfig) -> TokenLoss:
    """-A exp(mean over the answer of the clipped log ratio), the geometric mean of token ratios (arXiv 2507.20673).

    A log-ratio is clipped to [-clip_low, clip_high], only where that lowers the objective. The mean of an answer's
    advantages stands before the exponential.
    """
    gap = t.logprobs - t.old
    sign = torch.where(t.advantages > 0, 1.0, -1.0).to(gap)
    bounded = gap.clamp(-cfg.clip_low, cfg.clip_high)
    kept = sign * torch.minimum(sign * gap, sign * bounded)
    ratio = t.answers.spread(safe_exp(t.answers.mean(kept), RATIO_CAP))
    loss = -t.answers.spread(t.answers.mean(t.advantages)) * ratio
    gap = gap.detach()
    return TokenLoss(loss, safe_exp(gap, RATIO_CAP), kept.detach() != gap, _never(gap))


def cispo(t: Tokens, cfg: AlgorithmConfig) -> TokenLoss:
    """-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log pi: no token loses its gradient (MiniMax-M1, 2506.13585)."""
    ratio = safe_exp((t.logprobs - t.old).detach(), RATIO_CAP)
    weight = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return TokenLoss(-weight * t.advantages * t.logprobs, ratio, weight != ratio, _never(ratio))


def sapo(t: Tokens, cfg: AlgorithmConfig) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (ratio - 1)): a soft gate in place of a clip (SAPO, arXiv 2511.20347).

    tau is `sapo_tau_positive` for A > 0, else `sapo_tau_negative`.
    """
    ratio = safe_exp(t.logprobs - t.old, RATIO_CAP)
    tau = torch.full_like(ratio, cfg.sapo_tau_negative).masked_fill(t.advantages > 0, cfg.sapo_tau_positive)
    loss = -t.advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))
    return TokenLoss(loss, ratio.detach(), _never(ratio), _never(ratio))


def dppo_tv(t: Tokens, cfg: AlgorithmConfig) -> TokenLoss:
    """-sg[min(ratio, dppo_cap)] A log pi, without tokens whose *probability* moved too far in the wanted direction.

    Masked: A > 0 and p - p_old > clip_high, or A <= 0 and p - p_old < -clip_low (DPPO with
    the total variation of "this token or another", arXiv 2602.04879).
    """
    ratio = safe_exp((t.logprobs - t.old).detach(), RATIO_CAP)
    moved = t.logprobs.detach().exp() - t.old.exp()
    far = torch.where(t.advantages > 0, moved > cfg.clip_high, moved < -cfg.clip_low)
    loss = -ratio.clamp(max=cfg.dppo_cap) * t.advantages * t.logprobs
    return TokenLoss(torch.where(far, 0.0, loss), ratio, far, _never(ratio))


def reinforce(t: Tokens, cfg: AlgorithmConfig) -> TokenLoss:
    """-A log pi. The ratio is reported but has no part in the gradient."""
    ratio = safe_exp(t.logprobs.detach() - t.old, RATIO_CAP)
    return TokenLoss(-t.advantages * t.logprobs, ratio, _never(ratio), _never(ratio))


def _never(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


LossFn = Callable[[Tokens, "AlgorithmConfig"], TokenLoss]
LOSSES: dict[str, LossFn] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "reinforce": reinforce,
}


def registered_loss(name: str) -> LossFn:
    if name not in LOSSES:
        raise ConfigError(f"algorithm.loss {name!r} is unknown; there are: {', '.join(LOSSES)}")
    return LOSSES[name]
