"""The loss function that a trainer engine calls for each micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from mindspeed_asyncflow.algorithms.aggregate import token_weights
from mindspeed_asyncflow.algorithms.corrections import Correction, correct, mismatch, proximal_logprobs
from mindspeed_asyncflow.algorithms.kl import kl_loss
from mindspeed_asyncflow.algorithms.losses import RATIO_CAP, Answers, TokenLoss, Tokens, registered_loss
from mindspeed_asyncflow.algorithms.safe_exp import safe_exp
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.records import MicroBatch

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import AlgorithmConfig, CorrectionConfig

Metrics = dict[str, torch.Tensor]  # scalars; keys end in _sum, _count, _max or _min: how parts are joined
_REPORTED_CAP = 2.0  # importance weights are reported with this cap where none is configured


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
    """The loss that the settings describe; without `correction` there is none. Raises `ConfigError` for unknown names.

    `parts` say what the loss denominator counts: `actor/loss_tokens_count` and `actor/loss_sequences_count`.
    """
    from mindspeed_asyncflow.config.schema import CorrectionConfig as Defaults

    token_loss = registered_loss(cfg.loss)
    kl_term = kl_loss(cfg.kl_type) if cfg.kl_coef > 0 and cfg.kl_in == "loss" else None
    proximal = "current" if cfg.loss == "reinforce" else cfg.proximal
    how = correction or Defaults()
    corrected = how.weight != "off" or how.reject != "off" or how.opsm_delta is not None or how.stale_power > 0
    cap = how.cap if how.weight != "off" else _REPORTED_CAP

    def policy_loss(logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        trained = np.flatnonzero(batch.loss_mask)  # [N]
        index = torch.from_numpy(trained).to(logprobs.device)

        def take(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[trained]).to(logprobs)

        logprobs = logprobs.index_select(0, index)
        rollout, advantages = take(batch.rollout_logprobs), take(batch.advantages)
        lags = None if batch.lags is None else take(batch.lags)
        sequence = batch.sample_index[trained]
        answers = Answers(torch.from_numpy(sequence).to(logprobs.device), len(batch.rows))
        old = proximal_logprobs(proximal, logprobs, rollout, lags)
        tokens = token_loss(Tokens(logprobs, old, advantages, answers), cfg)
        loss, kept = tokens.loss, None
        extra: Metrics = {}
        if corrected:
            bypass = proximal == "rollout"
            found: Correction = correct(
                how,
                logprobs=logprobs,
                old=old,
                rollout=rollout,
                advantages=advantages,
                answers=answers,
                lags=lags,
                bypass=bypass,
            )
            kept, extra = found.kept, found.metrics
            loss = loss if found.weight is None else loss * found.weight
        mask = np.asarray(batch.loss_mask)
        if kept is not None and how.rejected == "leave_out":
            counts = kept.cpu().numpy()
            mask, sequence = mask.copy(), sequence[counts]
            mask[trained] *= counts
        weight = take(token_weights(batch, cfg.aggregation, mask))
        total = (loss * weight).sum()
        with torch.no_grad():
            parts = _parts(tokens, loss, logprobs, old, rollout, cap) | extra
            parts["actor/entropy_sum"] = entropy.index_select(0, index).sum()
        if kl_term is not None:
            kl = kl_term(logprobs, take(_reference(batch)))
            parts["actor/kl_loss_sum"] = kl.detach().sum()
            if cfg.kl_weighted:
                kl = kl * safe_exp(logprobs - old, RATIO_CAP)
            total = total + cfg.kl_coef * (kl * weight).sum()
        parts["actor/loss_sum"] = total.detach()
        parts["actor/loss_tokens_count"] = torch.tensor(float(len(sequence)))
        parts["actor/loss_sequences_count"] = torch.tensor(float(np.count_nonzero(np.bincount(sequence))))
        return total, parts

    return policy_loss


def _reference(batch: MicroBatch) -> np.ndarray:
    if batch.ref_logprobs is None:
        raise ConfigError("algorithm.kl_coef > 0 needs reference log-probabilities, but the batch brings none")
    return batch.ref_logprobs


def _parts(
    tokens: TokenLoss, loss: torch.Tensor, logprobs: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, cap: float
) -> Metrics:
    """Sums, counts and extremes over the N trained tokens; no extremes where N is 0."""
    high = tokens.clipped & (tokens.ratio > 1)
    apart = mismatch(logprobs, rollout, cap)
    sums = apart | {
        "actor/tokens_count": torch.ones_like(loss),
        "actor/pg_loss_sum": loss,
        "actor/ppo_kl_sum": old - logprobs,
        "actor/pg_clipfrac_sum": tokens.clipped,
        "actor/pg_clipfrac_low_sum": tokens.clipped & ~high,
        "actor/pg_clipfrac_high_sum": high,
        "actor/pg_clipfrac_lower_sum": tokens.clipped_lower,
        "actor/ratio_sum": tokens.ratio,
    }
    joined = torch.stack([value.to(loss.dtype) for value in sums.values()]).sum(dim=1)
    parts = dict(zip(sums, joined.unbind()))
    if len(loss):
        parts["actor/ratio_min"], parts["actor/ratio_max"] = tokens.ratio.aminmax()
        weights = apart["rollout_corr/is_sum"]
        parts["rollout_corr/is_min"], parts["rollout_corr/is_max"] = weights.aminmax()
        parts["rollout_corr/abs_diff_max"] = apart["rollout_corr/abs_diff_sum"].max()
    return parts
