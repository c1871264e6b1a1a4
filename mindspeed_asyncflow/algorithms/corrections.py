"""Off-policy corrections: how much each token counts, from the policies that sampled, that the ratio refers to, and
that is trained.

    mu       rollout policy: sampled the token
    old      proximal policy, which the loss's ratio refers to (`algorithm.proximal`)
    pi       the policy that is trained

Weights use old / mu, so that weight x ratio = pi / mu. Where old is mu (`rollout`) they are 1, and masks use pi / mu.
Nothing here carries a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mindspeed_asyncflow.algorithms.losses import RATIO_CAP, Answers
from mindspeed_asyncflow.algorithms.safe_exp import safe_exp

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import CorrectionConfig

Metrics = dict[str, torch.Tensor]


def proximal_logprobs(
    proximal: str, logprobs: torch.Tensor, rollout: torch.Tensor, lags: torch.Tensor | None
) -> torch.Tensor:
    """log of the proximal policy [N], no gradient.

    rollout: mu (bypass). current: pi before the step, which is pi itself, as a batch makes one step. log_linear:
    log old = log mu + a (log pi - log mu) with a = (lag - 1) / lag: the proximal policy is the version before the one
    that is trained, on the straight line between the two in log space (arXiv 2512.06547); pi for tokens of lag 0.
    """
    pi = logprobs.detach()
    if proximal == "rollout":
        return rollout
    if proximal == "current":
        return pi
    if lags is None:
        raise ValueError("proximal log_linear needs the lag of every token")
    alpha = torch.where(lags > 0, (lags - 1) / lags.clamp(min=1), 1.0).to(pi)
    return rollout + alpha * (pi - rollout)


@dataclass(frozen=True, slots=True)
class Correction:
    weight: torch.Tensor | None  # [N] that multiplies the loss, 0 where masked; None: all are 1
    kept: torch.Tensor | None  # bool [N]; None: all
    metrics: Metrics


def correct(
    cfg: CorrectionConfig,
    *,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    answers: Answers,
    lags: torch.Tensor | None = None,
    bypass: bool = False,
) -> Correction:
    """What `cfg` makes of N tokens, [N] each. `bypass`: old is rollout."""
    pi = logprobs.detach()
    gap = old - rollout  # log old/mu
    metrics: Metrics = {}
    weight: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    if cfg.weight != "off":
        raw = _log_ratio(cfg.weight, gap, answers)
        weight, outside = _bounded(raw, cfg)
        metrics["rollout_corr/weight_outside_sum"] = outside.sum()
        metrics["rollout_corr/weight_log_raw_sum"] = raw.sum()
        if cfg.beyond == "zero":
            kept = ~outside
    if cfg.reject != "off":
        inside = _inside(cfg, pi - rollout if bypass else gap, pi if bypass else old, rollout, answers)
        metrics["rollout_corr/rejected_sum"] = (~inside).sum()
        kept = inside if kept is None else kept & inside
    if cfg.opsm_delta is not None:
        far = answers.spread(answers.mean(rollout - pi)) > cfg.opsm_delta
        dropped = (advantages < 0) & far
        metrics["rollout_corr/opsm_sum"] = dropped.sum()
        kept = ~dropped if kept is None else kept & ~dropped
    if cfg.stale_power > 0:
        if lags is None:
            raise ValueError("correction.stale_power needs the lag of every token")
        young = lags.clamp(min=1).to(pi) ** -cfg.stale_power
        metrics["rollout_corr/stale_weight_sum"] = young.sum()
        weight = young if weight is None else weight * young
    if kept is not None:
        weight = kept.to(pi) if weight is None else weight * kept
        metrics["rollout_corr/masked_sum"] = (~kept).sum()
    return Correction(weight, kept, metrics)


def _log_ratio(level: str, gap: torch.Tensor, answers: Answers) -> torch.Tensor:
    """log of the ratio of each token, of its answer (product), or of the geometric mean of its answer, [N]."""
    if level == "token":
        return gap
    return answers.spread(answers.sum(gap) if level == "sequence" else answers.mean(gap))


def _bounded(raw: torch.Tensor, cfg: CorrectionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N] inside [floor, cap], and bool [N]: the raw one was outside. Compared as logarithms: the product over
    a long answer may be 1e-47, which exp() would turn into 0 or, upwards, into inf."""
    low = math.log(cfg.floor) if cfg.floor > 0 else -math.inf
    high = math.log(cfg.cap)
    outside = (raw < low) | (raw > high)
    weight = raw.clamp(low, high).exp()
    return (torch.where(outside, 0.0, weight) if cfg.beyond == "zero" else weight), outside


def _inside(
    cfg: CorrectionConfig, gap: torch.Tensor, now: torch.Tensor, rollout: torch.Tensor, answers: Answers
) -> torch.Tensor:
    if cfg.reject == "kpop":
        return bernoulli_kl(now, rollout) <= cfg.reject_high
    raw = _log_ratio(cfg.reject, gap, answers)
    low = math.log(cfg.reject_low) if cfg.reject_low > 0 else -math.inf
    return (raw >= low) & (raw <= math.log(cfg.reject_high))


def bernoulli_kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """max(KL(p||q), KL(q||p)) in nat of "this token or another", [N]; a, b: log-probabilities of the token."""
    tiny = torch.finfo(a.dtype).tiny
    p, q = a.exp(), b.exp()
    rest_p, rest_q = ((-torch.expm1(x)).clamp(min=tiny) for x in (a, b))
    other = rest_p.log() - rest_q.log()
    return torch.maximum(p * (a - b) + rest_p * other, -q * (a - b) - rest_q * other)


def mismatch(logprobs: torch.Tensor, rollout: torch.Tensor, cap: float) -> Metrics:
    """Sums over N tokens of what tells pi and mu apart; `cap` bounds the importance weights that are reported."""
    drift = logprobs.detach() - rollout
    unbounded = safe_exp(drift, RATIO_CAP)
    importance = unbounded.clamp(max=cap)
    return {
        "rollout_corr/kl_sum": -drift,
        "rollout_corr/k3_kl_sum": unbounded - drift - 1,
        "rollout_corr/chi2_token_sum": unbounded.square() - 1,
        "rollout_corr/abs_diff_sum": drift.abs(),
        "rollout_corr/is_sum": importance,
        "rollout_corr/is_sq_sum": importance.square(),
        "rollout_corr/is_clipfrac_sum": unbounded > cap,
    }
