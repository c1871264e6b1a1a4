"""`summary.json`: the figures of a whole run, checked for balance, and the same in words."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.errors import MetricError
from mindspeed_asyncflow.observe.checkpoints import LATEST
from mindspeed_asyncflow.observe.run_folder import RunFolder

REQUIRED = (
    "reward_first",
    "reward_last",
    "heldout_greedy",
    "steps",
    "wall_s",
    "max_lag",
    "samples_issued",
    "samples_trained",
    "samples_dropped",
    "samples_open",
    "rollout_train_logprob_gap_max",
)
"""Keys of every summary. Further ones that are shown where present: `error` (root error of a failed run), `note` (why
it ended early without an error), `heldout_first`, `evaluation_first` and `evaluation` (the newest one; keys as in
`evaluations.jsonl`), `dropped_by_reason` {reason: answers}, `lag_histogram` {lag:
answers}, `samples_per_s`, `tokens_per_s`, `trainer_idle_share`, `rollout_idle_share`, `bottleneck` (in words), `task`,
`model`, `dtype`, `steps_before` (made by processes before this one; `wall_s` is the time of this one),
`rollout_train_logprob_gap_limit` (a run that exceeds it stops)."""

TREND_STEPS = 20
_COUNTS = ("steps", "samples_issued", "samples_trained", "samples_dropped", "samples_open")


def check_summary(summary: Mapping[str, Any]) -> None:
    """Raise `MetricError` when a key is missing, a count is not a natural number, or the ledger does not balance.

    Measured values may be None where nothing was measured (a run that failed early, evaluation switched off).
    """
    missing = [key for key in REQUIRED if key not in summary]
    if missing:
        raise MetricError(f"summary lacks {', '.join(missing)}")
    for key in _COUNTS:
        value = summary[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise MetricError(f"summary: {key} must be a count, got {value!r}")
    for key in REQUIRED:
        value = summary[key]
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise MetricError(f"summary: {key} must be a finite number or null, got {value!r}")
    issued, trained = summary["samples_issued"], summary["samples_trained"]
    dropped, still_open = summary["samples_dropped"], summary["samples_open"]
    if issued != trained + dropped + still_open:
        raise MetricError(
            f"summary: samples_issued {issued} != trained {trained} + dropped {dropped} + open {still_open}; "
            "a sample was lost or counted twice"
        )
    reasons = summary.get("dropped_by_reason")
    if reasons is not None and sum(reasons.values()) != dropped:
        raise MetricError(f"summary: dropped_by_reason {dict(reasons)} does not add up to samples_dropped {dropped}")


def write_summary(folder: RunFolder, summary: Mapping[str, Any]) -> Path:
    """Check `summary` and write `summary.json` in one step: a reader sees the old file or the whole new one."""
    check_summary(summary)
    temporary = folder.summary.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(dict(summary), file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder.summary)
    return folder.summary


def closing_words(summary: Mapping[str, Any], folder: Path | str | None = None) -> str:
    """What happened, in a few plain lines; `folder`: where the results lie."""
    get = summary.get
    lines = [_opening(summary)]
    if get("note"):
        lines.append(f"Note: {get('note')}.")
    first, last = get("reward_first"), get("reward_last")
    if first is not None and last is not None:
        trend = _trend(first, last) if get("steps", 0) >= TREND_STEPS else ""  # a few steps tell nothing
        lines.append(f"Reward went from {_num(first)} to {_num(last)}{trend}.")
    lines += _heldout(summary) if get("steps", 0) else []  # the model as it came tells nothing of the run
    speed = [f"{_num(summary[key])} {unit}" for key, unit in
             (("samples_per_s", "answers/s"), ("tokens_per_s", "tokens/s"))
             if get(key) is not None]  # fmt: skip
    idle = [f"{side} idle {get(key):.0%}" for key, side in
            (("trainer_idle_share", "trainer"), ("rollout_idle_share", "rollout")) if get(key) is not None]  # fmt: skip
    if speed or idle:
        lines.append("Speed: " + ", ".join(speed + idle) + ".")
    if get("bottleneck"):
        lines.append(f"What held it back: {get('bottleneck')}.")
    lines.append(_ledger(summary))
    if get("rollout_train_logprob_gap_max") is not None:
        lines.append(_gap(summary))
    if folder is not None:
        lines.append(f"Results: {folder}")
        lines.append(_next_look(summary))
        if get("error") and (RunFolder(Path(folder)).checkpoints / LATEST).exists():
            lines.append(f"To go on from its newest checkpoint: the same command with --run-folder {folder}")
        elif get("error") and get("steps"):
            lines.append("No checkpoint was made, so these steps are lost; trainer.save_every makes some on the way.")
    return "\n".join(lines)


def _heldout(summary: Mapping[str, Any]) -> list[str]:
    get, now = summary.get, summary.get("evaluation") or {}
    k, value, first = now.get("k", 1), get("heldout_greedy"), get("heldout_first")
    said = "Greedy answers to held-out prompts score"
    if now and (k > 1 or now["temperature"]):
        many = f"{k} answers each" if k > 1 else "An answer each"
        said = f"{many} to {now['prompts']} held-out prompts at temperature {now['temperature']:g} score"
        value, first = now["mean_at_k"], (get("evaluation_first") or now)["mean_at_k"]
    lines = []
    if value is not None:
        before = f" (before training {_num(first)})" if first is not None else ""
        maj = _num(now["maj_at_k"]) if now.get("maj_at_k") is not None else "unknown"
        more = f"; pass@{k} {_num(now['pass_at_k'])}, maj@{k} {maj}" if k > 1 else ""
        lines.append(f"{said} {_num(value)}{before}{more}.")
    if now.get("unscored"):
        lines.append(f"{now['unscored']:.1%} of the evaluation's answers got no score and count in no mean.")
    return lines


def _gap(summary: Mapping[str, Any]) -> str:
    gap, limit = summary["rollout_train_logprob_gap_max"], summary.get("rollout_train_logprob_gap_limit")
    said = f"At equal weights, trainer and rollout differ by at most {gap:.1e} nat per token"
    if summary.get("dtype") != "bfloat16" or limit is None:
        return f"{said}."
    return f"{said}; rounding in bfloat16 (model.dtype) gives up to about 0.3, and above {limit:g} a run stops."


def _opening(summary: Mapping[str, Any]) -> str:
    steps, before, took = summary.get("steps", 0), summary.get("steps_before", 0), duration(summary.get("wall_s"))
    here = f"the last {steps - before} in {took}" if steps > before else f"none of them in the last {took}"
    after = f", {here}" if before else f" and {took}"
    what = f"{summary.get('model', 'the policy')} on {summary['task']}" if summary.get("task") else "the policy"
    if _interrupted(summary):
        whom = "its client" if "by its client" in str(summary["error"]) else "a signal"
        return f"Stopped by {whom} after {steps} steps{after}."
    if summary.get("error"):
        return f"The run FAILED after {steps} steps{after}: {summary['error']}"
    return f"Trained {what} for {steps} steps{after if before else f' in {took}'}."


def _interrupted(summary: Mapping[str, Any]) -> bool:
    return str(summary.get("error", "")).startswith("Interrupted")


def _trend(first: float, last: float) -> str:
    if last > first + 0.02:
        return ""
    return ", worse than at the start" if last < first - 0.02 else ", about the same: the policy did not learn"


def _ledger(summary: Mapping[str, Any]) -> str:
    dropped = summary.get("samples_dropped", 0)
    reasons = {name: n for name, n in (summary.get("dropped_by_reason") or {}).items() if n}
    why = f" ({', '.join(f'{name} {n}' for name, n in sorted(reasons.items()))})" if reasons else ""
    age = summary.get("max_lag")
    lag = f" The oldest token trained on was {age} version{'s' if age != 1 else ''} old." if age else ""
    issued, trained = summary.get("samples_issued", 0), summary.get("samples_trained", 0)
    return (
        f"{issued:,} answers were asked for: {trained:,} trained, {dropped:,} dropped{why}, "
        f"{summary.get('samples_open', 0):,} still open at the end.{lag}"
    )


def _next_look(summary: Mapping[str, Any]) -> str:
    if _interrupted(summary):
        return "Look next: report.html for what went on, samples/ for answers."
    if summary.get("error"):
        return "Look next: log.txt for the whole error, report.html for what went on before it."
    return "Look next: report.html for the curves, samples/ for answers, hf/ for the trained policy."


def duration(seconds: float | None) -> str:
    """`85.2` -> `1 min 25 s`."""
    if seconds is None:
        return "an unknown time"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _num(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
