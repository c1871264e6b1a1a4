"""From joined metric sums to the numbers that a user reads."""

from __future__ import annotations

from collections.abc import Mapping

_JOIN = {"sum": lambda a, b: a + b, "count": lambda a, b: a + b, "max": max, "min": min}
_BY_DENOMINATOR = ("actor/loss", "actor/pg_loss", "actor/kl_loss")  # aggregated as the loss is
_SQUARED = "rollout_corr/rollout_is_sq"


def join_metrics(parts: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Metrics of two disjoint sets of tokens as those of their union; the suffix of a key says how."""
    joined = dict(parts)
    for key, value in more.items():
        joined[key] = _JOIN[key.rpartition("_")[2]](joined[key], value) if key in joined else value
    return joined


def summarise(joined: Mapping[str, float], denominator: float) -> dict[str, float]:
    """Means per trained token; losses by `denominator` (see `loss_denominator`); extremes and counts as they are.

    Adds `rollout_corr/rollout_is_eff_sample_size`: (sum w)^2 / (n sum w^2) of the capped importance weights w,
    1 where all are equal. The names follow verl where it has one.
    """
    tokens = joined.get("actor/tokens_count", 0.0)
    summary: dict[str, float] = {}
    for key, value in joined.items():
        stem, _, how = key.rpartition("_")
        if how == "sum" and stem != _SQUARED:
            summary[stem] = value / (denominator if stem in _BY_DENOMINATOR else max(tokens, 1.0))
        elif how != "sum":
            summary[key] = value
    squares = joined.get(f"{_SQUARED}_sum", 0.0)
    if tokens and squares:
        total = joined["rollout_corr/rollout_is_sum"]
        summary["rollout_corr/rollout_is_eff_sample_size"] = total * total / (tokens * squares)
    return summary
