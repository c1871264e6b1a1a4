"""The loss function that a trainer engine calls for each micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from mindspeed_asyncflow.algorithms.aggregate import loss_denominator, token_weights
from mindspeed_asyncflow.algorithms.kl import kl_loss
from mindspeed_asyncflow.algorithms.losses import TokenLoss, registered_loss, truncated_weight
from mindspeed_asyncflow.algorithms.safe_exp import safe_exp
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.records import MicroBatch

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import AlgorithmConfig, CorrectionConfig

Metrics = dict[str, torch.Tensor]  # scalars; keys end in _sum, _count, _max or _min: how parts are joined
_REPORTED_CAP = 2.0  # importance weights are reported with this cap where none is configured
_EXP_CAP = 20.0  # nats


class PolicyLoss(Protocol):
    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, Metrics]:
        """Loss *sum* of one micro-batch of whole samples, and metric parts whose joins over any cut are the whole's.

        `logprobs` [T] of `batch.targets`, with gradient, of the distribution that was sampled from (temperature
        already applied); `entropy` [T] of the same, no gradient. Positions where the loss mask is 0 are never read.
        """
        ...


def make_policy_loss(cfg: AlgorithmConfig, correction: CorrectionConfig | None = None) -> PolicyLoss:
    """The loss that `cfg` describes. Raises `ConfigError` for unknown names.

    The PPO ratio refers to the sampling policy (`proximal: rollout`) or to the current one (`current`: value 1, the
    gradient remains). `tis_cap` weighs tokens by min(old / rollout, cap), so it acts with `current` and `reinforce`.
    """
    token_loss = registered_loss(cfg.loss)
    cap = correction.cap if correction is not None and correction.weight != "off" else None
    kl_term = kl_loss(cfg.kl_type) if cfg.kl_coef > 0 else None
    current_is_old = cfg.proximal == "current" or cfg.loss == "reinforce"

    def policy_loss(logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        trained = np.flatnonzero(batch.loss_mask)  # [N]
        index = torch.from_numpy(trained).to(logprobs.device)

        def take(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[trained]).to(logprobs)

        logprobs = logprobs.index_select(0, index)
        rollout = take(batch.rollout_logprobs)
        weight = take(token_weights(batch, cfg.aggregation))
        old = logprobs.detach() if current_is_old else rollout
        tokens = token_loss(logprobs, old, take(batch.advantages), cfg)
        loss = tokens.loss
        if cap is not None:
            loss = loss * truncated_weight(old, rollout, cap)
        total = (loss * weight).sum()
        with torch.no_grad():
            parts = _parts(tokens, loss, logprobs, old, rollout, cap)
            parts["actor/entropy_sum"] = entropy.index_select(0, index).sum()
        if kl_term is not None:
            kl = kl_term(logprobs, take(_reference(batch)))
            parts["actor/kl_loss_sum"] = kl.detach().sum()
            total = total + cfg.kl_coef * (kl * weight).sum()
        sequences = len(np.unique(batch.sample_index[trained]))
        share = loss_denominator(cfg.aggregation, len(trained), sequences) if len(trained) else 0.0
        parts["actor/loss_weight_sum"] = torch.tensor(share)
        parts["actor/loss_sum"] = total.detach()
        parts["actor/loss_tokens_count"] = torch.tensor(float(len(trained)))
        parts["actor/loss_sequences_count"] = torch.tensor(float(sequences))
        return total, parts

    return policy_loss


def _reference(batch: MicroBatch) -> np.ndarray:
    if batch.ref_logprobs is None:
        raise ConfigError("algorithm.kl_coef > 0 needs reference log-probabilities, but the batch brings none")
    return batch.ref_logprobs


def _parts(
    tokens: TokenLoss,
    loss: torch.Tensor,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    rollout: torch.Tensor,
    cap: float | None,
) -> Metrics:
    """Sums, counts and extremes over the N trained tokens; no extremes where N is 0."""
    cap = cap or _REPORTED_CAP
    drift = logprobs - rollout  # log pi - log mu
    gap = drift.abs()
    unbounded = safe_exp(drift, _EXP_CAP)
    importance = unbounded.clamp(max=cap)
    high = tokens.clipped & (tokens.ratio > 1)
    sums = {
        "actor/tokens_count": torch.ones_like(loss),
        "actor/pg_loss_sum": loss,
        "actor/ppo_kl_sum": old - logprobs,
        "actor/pg_clipfrac_sum": tokens.clipped,
        "actor/pg_clipfrac_low_sum": tokens.clipped & ~high,
        "actor/pg_clipfrac_high_sum": high,
        "actor/pg_clipfrac_lower_sum": tokens.clipped_lower,
        "actor/ratio_sum": tokens.ratio,
        "rollout_corr/kl_sum": -drift,
        "rollout_corr/k3_kl_sum": unbounded - drift - 1,
        "rollout_corr/abs_diff_sum": gap,
        "rollout_corr/is_sum": importance,
        "rollout_corr/is_sq_sum": importance.square(),
        "rollout_corr/is_clipfrac_sum": unbounded > cap,
    }
    joined = torch.stack([value.to(loss.dtype) for value in sums.values()]).sum(dim=1)
    parts = dict(zip(sums, joined.unbind()))
    if len(loss):
        parts["actor/ratio_min"], parts["actor/ratio_max"] = tokens.ratio.aminmax()
        parts["rollout_corr/is_min"], parts["rollout_corr/is_max"] = importance.aminmax()
        parts["rollout_corr/abs_diff_max"] = gap.max()
    return parts
