"""The loss function that a trainer engine calls for each micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from mindspeed_asyncflow.algorithms.aggregate import token_weights
from mindspeed_asyncflow.algorithms.kl import kl_loss
from mindspeed_asyncflow.algorithms.losses import TokenLoss, registered_loss, truncated_weight
from mindspeed_asyncflow.algorithms.safe_exp import safe_exp
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.records import MicroBatch

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import AlgorithmConfig

Metrics = dict[str, torch.Tensor]  # scalars; keys end in _sum, _count, _max or _min: how parts are joined
_REPORTED_CAP = 2.0  # importance weights are reported with this cap where none is configured
_EXP_CAP = 20.0


class PolicyLoss(Protocol):
    def __call__(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        batch: MicroBatch,
        weights: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, Metrics]:
        """Loss *sum* of one micro-batch, and metric sums.

        `logprobs` [T] of `batch.targets`, with gradient, of the distribution that was sampled from (temperature
        already applied); `entropy` [T] of the same, no gradient, same dtype. `weights` float32 [T] are the
        `token_weights` where `batch` is a cut inside samples. Values at masked positions have no influence.
        """
        ...


def make_policy_loss(cfg: AlgorithmConfig) -> PolicyLoss:
    """The loss that `cfg` describes. Raises `ConfigError` for unknown names."""
    token_loss = registered_loss(cfg.loss)
    kl_term = kl_loss(cfg.kl_type) if cfg.kl_coef > 0 else None
    current_is_old = cfg.proximal == "current" or cfg.loss == "reinforce"

    def policy_loss(
        logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch, weights: np.ndarray | None = None
    ) -> tuple[torch.Tensor, Metrics]:
        def like(array: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(array).to(logprobs)

        mask = like(batch.loss_mask)
        weight = like(token_weights(batch, cfg.aggregation) if weights is None else weights)
        # Masked positions may hold anything, even -inf: replaced before any arithmetic, as 0 x inf is NaN.
        logprobs = torch.where(mask > 0, logprobs, 0)
        rollout = like(batch.rollout_logprobs)
        old = logprobs.detach() if current_is_old else rollout
        tokens = token_loss(logprobs, old, like(batch.advantages), cfg)
        loss = tokens.loss
        if cfg.tis_cap is not None:
            loss = loss * truncated_weight(old, rollout, cfg.tis_cap)
        with torch.no_grad():
            metrics = _metrics(tokens, loss * weight, logprobs, old, rollout, mask, cfg)
            metrics["actor/entropy_sum"] = torch.where(mask > 0, entropy, 0).sum()
        total = (loss * weight).sum()
        if kl_term is not None:
            kl = kl_term(logprobs, _reference(batch, like, mask))
            metrics["actor/kl_loss_sum"] = (kl.detach() * weight).sum()
            total = total + cfg.kl_coef * (kl * weight).sum()
        metrics["actor/loss_sum"] = total.detach()
        return total, metrics

    return policy_loss


def _reference(batch: MicroBatch, like, mask: torch.Tensor) -> torch.Tensor:
    if batch.ref_logprobs is None:
        raise ConfigError("algorithm.kl_coef > 0 needs reference log-probabilities, but the batch brings none")
    return torch.where(mask > 0, like(batch.ref_logprobs), 0)


def _metrics(
    tokens: TokenLoss,
    weighted: torch.Tensor,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    cfg: AlgorithmConfig,
) -> Metrics:
    """Sums, counts and extremes whose joins over any cut are those of the whole; `summary.py` turns them into means."""
    drift = (logprobs - rollout) * mask  # log pi - log mu, 0 where masked
    exp_drift = safe_exp(drift, _EXP_CAP)
    importance = exp_drift.clamp(max=cfg.tis_cap or _REPORTED_CAP) * mask
    stacked = torch.stack(
        [
            mask,
            weighted,
            tokens.clipped * mask,
            tokens.clipped_lower * mask,
            (old - logprobs) * mask,
            -drift,
            (exp_drift - drift - 1) * mask,
            drift.abs(),
            importance,
            importance.square(),
        ]
    ).sum(dim=1)
    names = (
        "actor/tokens_count",
        "actor/pg_loss_sum",
        "actor/pg_clipfrac_sum",
        "actor/pg_clipfrac_lower_sum",
        "actor/ppo_kl_sum",
        "rollout_corr/kl_sum",
        "rollout_corr/k3_kl_sum",
        "rollout_corr/logprob_abs_diff_sum",
        "rollout_corr/rollout_is_sum",
        "rollout_corr/rollout_is_sq_sum",
    )
    metrics = dict(zip(names, stacked.unbind()))
    metrics["actor/ratio_max"] = (tokens.ratio * mask).max()
    metrics["rollout_corr/rollout_is_max"] = (exp_drift * mask).max()
    metrics["rollout_corr/logprob_abs_diff_max"] = drift.abs().max()
    return metrics
