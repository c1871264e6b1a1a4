"""Metrics and evaluations of a run as curves over steps."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_STEPS = 4000  # points of a curve; a page with some dozens of curves of several runs stays at a few MB


@dataclass(frozen=True, slots=True)
class Curves:
    """`steps` (0-based) and when each was written (epoch s), in order; `values` of a metric have one place for each
    step, None where it has no finite value."""

    steps: list[int]
    times: list[float]
    values: dict[str, list[float | None]]

    def first(self, name: str) -> float | None:
        return next((v for v in self.values.get(name, ()) if v is not None), None)

    def last(self, name: str) -> float | None:
        return next((v for v in reversed(self.values.get(name, ())) if v is not None), None)


def read_curves(path: Path, missing: list[str]) -> Curves:
    """Of `metrics.jsonl`. A last line that was cut off when the process was killed is left out."""
    records: dict[int, dict[str, Any]] = {}  # a step may have several lines
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines) - 1:
                break
            raise
        records.setdefault(int(record["step"]), {"time": record["time"]}).update(
            {name: value for name, value in record.items() if name not in ("step", "time")}
        )
    if not records:
        missing.append("metrics.jsonl: no step was finished")
    steps = sorted(records)
    if len(steps) > MOST_STEPS:
        stride = math.ceil(len(steps) / MOST_STEPS)
        missing.append(f"curves: every {stride}th of {len(steps)} steps is drawn; all are in metrics.jsonl")
        steps = [*steps[:-1:stride], steps[-1]]
    names = dict.fromkeys(name for step in steps for name in records[step] if name != "time")
    values = {name: [_finite(records[step].get(name)) for step in steps] for name in names}
    return Curves(steps, [float(records[step]["time"]) for step in steps], values)


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Whole lines of `evaluations.jsonl`."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _finite(value: Any) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
