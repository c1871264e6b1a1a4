"""Names are checked, parts from ranks and micro-batches are merged, and the table becomes a page of documentation.

A *part* is a dict of keys ending in `_sum`, `_count`, `_max`, `_min` (`Metric.part`). Merging parts is associative and
commutative, so that micro-batches, calls and ranks can be merged in any order; only then are means formed, each with
its own denominator. A mean of means never happens.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence

from mindspeed_asyncflow.errors import MetricError
from mindspeed_asyncflow.observe.table import METRICS, Metric

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
_FAMILIES = [metric.name for metric in METRICS if "*" in metric.name]

_SQUARES = {"rollout_corr/is_eff_sample_size": ("rollout_corr/is_sum", "rollout_corr/is_sq_sum")}


def _merge_rules() -> dict[str, str]:
    rules = {m.part: {"mean": "sum"}.get(m.reducer, m.reducer) for m in METRICS if m.reducer != "ess"}
    rules.update({m.per: "sum" for m in METRICS if m.per})
    return rules


_RULES: dict[str, str] = _merge_rules()


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""


def check_names(metrics: Mapping[str, object]) -> None:
    """Raise `MetricError` when a key of `metrics` is not a metric of the table."""
    for name in metrics:
        if name not in BY_NAME and not any(fnmatch.fnmatchcase(name, family) for family in _FAMILIES):
            raise MetricError(f"unknown metric '{name}'{_nearest(name, BY_NAME)}; add a row to observe/table.py")


def merge_parts(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge parts into one part, without forming means. Raises `MetricError` for a key that no metric uses."""
    merged: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            rule = _RULES.get(key)
            if rule is None:
                hint = f"; send it as '{BY_NAME[key].part}'" if key in BY_NAME else _nearest(key, _RULES)
                raise MetricError(f"unknown metric part '{key}'{hint}")
            if key not in merged or rule == "last":
                merged[key] = value
            elif rule == "sum":
                merged[key] += value
            else:
                # A NaN must survive: max() and min() of Python would drop it, depending on the order.
                old = merged[key]
                better = max(old, value) if rule == "max" else min(old, value)
                merged[key] = math.nan if math.isnan(old) or math.isnan(value) else better
    return merged


def reduce_sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metric values from the parts of ranks, calls and micro-batches.

    A mean is the sum of its numerators over the sum of its denominators (`Metric.per`), NaN where that is 0. Raises
    `MetricError` for an unknown key and for a numerator that came without its denominator.
    """
    merged = merge_parts(parts)
    values: dict[str, float] = {}
    for metric in METRICS:
        if metric.reducer == "ess":
            total, squares = (merged.get(key) for key in _SQUARES[metric.name])
            if total is None or squares is None:
                continue
            values[metric.name] = _ratio(total * total, _denominator(metric, merged) * squares)
        elif metric.part in merged:
            value = merged[metric.part]
            values[metric.name] = _ratio(value, _denominator(metric, merged)) if metric.reducer == "mean" else value
    return values


def describe(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """`{prefix}/mean`, `/max` and `/min` of `values`; empty for no values. The three names must be in the table."""
    if not len(values):
        return {}
    result = {
        f"{prefix}/mean": math.fsum(float(v) for v in values) / len(values),
        f"{prefix}/max": float(max(values)),
        f"{prefix}/min": float(min(values)),
    }
    check_names(result)
    return result


def explained_variance(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of a critic's returns by its values; nothing where there are none, or where all returns are equal."""
    if "critic/returns_mean" not in metrics:
        return {}
    of_returns = metrics["critic/returns_sq_mean"] - metrics["critic/returns_mean"] ** 2
    left = metrics["critic/residual_sq_mean"] - metrics["critic/residual_mean"] ** 2
    return {"critic/vf_explained_var": 1 - left / of_returns} if of_returns > 1e-12 else {}


def metrics_page() -> str:
    """The text of `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Generated from `mindspeed_asyncflow/observe/table.py`; write it again with",
        "`python -m mindspeed_asyncflow.observe.metrics > docs/metrics.md`.",
        "",
        "`step` of a record counts from 0, as do the files of `samples/` and `asyncflow audit`; terminal, `log.txt`",
        "and folders of checkpoints count the steps that are made: the record with step 3 and",
        "`samples/step_000003.txt` are of the step that ends with `step 4/60`.",
        "",
        "Each step is one line of `metrics.jsonl` and one TensorBoard step under the same names. Ranks and",
        "micro-batches send parts that merge in any order: *mean* = sum of `part` / sum of `per`; *max*, *min*,",
        "*sum* over all parts; *last* = one owner, the newest value counts; *ess* = effective sample size, from the",
        "two sums named. A metric that a single process measures is logged under its name directly.",
        "Times are seconds of wall clock. `mu` is the policy that sampled, `pi` the policy that is trained.",
        "",
        "| Name | Unit | Reducer | Part (per) | Definition | verl name |",
        "|---|---|---|---|---|---|",
    ]
    for m in METRICS:
        part = ", ".join(f"`{key}`" for key in _SQUARES.get(m.name, (m.part,))) + (f" (`{m.per}`)" if m.per else "")
        alias = f"`{m.alias}`" if m.alias else ""
        definition = m.definition.replace("|", "\\|")
        lines.append(f"| `{m.name}` | {m.unit} | {m.reducer} | {part} | {definition} | {alias} |")
    return "\n".join(lines) + "\n"


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _denominator(metric: Metric, merged: Mapping[str, float]) -> float:
    if metric.per not in merged:
        raise MetricError(f"metric '{metric.name}' came without its denominator '{metric.per}'")
    return merged[metric.per]


if __name__ == "__main__":
    print(metrics_page(), end="")
