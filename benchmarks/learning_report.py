"""From the runs of benchmarks/learning.py to tables, a picture and the last line."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_jobs import BASE, ON_POLICY, UNCORRECTED, Job

LAST = 10  # steps whose mean score is the final one
GROUPS = 32  # prompts of a step: independent draws, whose answers are not
LEAST = 0.05  # smallest rise that counts
COLOURS = ("#1f6fb4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#a6761d")
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Table:
    lines: list[str]
    rows: list[dict[str, Any]]


def final(scores: Sequence[float]) -> float:
    return statistics.fmean(scores[-LAST:])


def noise(score: float) -> float:
    """Largest standard error of a step's mean score: answers of one prompt may all agree, those of prompts do not."""
    return (max(score * (1 - score), 0.0) / GROUPS) ** 0.5


def improved(scores: Sequence[float], heldout: Sequence[float]) -> bool:
    """The final score lies above the first step's by more than two of its standard errors and by more than `LEAST`, and
    greedy answers to held-out prompts became better too."""
    rise = final(scores) - scores[0]
    return rise > max(2 * noise(scores[0]), LEAST) and heldout[1] > heldout[0]


def _of(jobs: Sequence[Job], results: Results, **wanted: Any) -> list[Mapping[str, Any]]:
    chosen = [job for job in jobs if all(getattr(job, name) == value for name, value in wanted.items())]
    return [results[job.key] for job in chosen if job.key in results]


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _names(jobs: Sequence[Job], attribute: str) -> list[Any]:
    return list(dict.fromkeys(getattr(job, attribute) for job in jobs))


def algorithm_table(jobs: Sequence[Job], results: Results) -> Table:
    """Mean and standard deviation over seeds of the first step's score, the final one and greedy held-out answers."""
    lines = [
        "| task | algorithm | first step | last ten steps | held-out, before | held-out, after | improved |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = []
    for task in _names(jobs, "task"):
        for name in _names(jobs, "name"):
            runs = _of(jobs, results, task=task, name=name)
            if not runs:
                continue
            first = statistics.fmean(run["scores"][0] for run in runs)
            last = [final(run["scores"]) for run in runs]
            before, after = ([run["heldout"][i] for run in runs] for i in (0, 1))
            good = sum(improved(run["scores"], run["heldout"]) for run in runs)
            rows.append(
                {
                    "task": task,
                    "algorithm": name,
                    "first": round(first, 3),
                    "last": round(statistics.fmean(last), 3),
                    "sd": round(_spread(last), 3),
                    "heldout": round(statistics.fmean(after), 3),
                    "improved": good,
                    "of": len(runs),
                }
            )
            lines.append(
                f"| {task} | {name} | {first:.2f} | {statistics.fmean(last):.3f} ± {_spread(last):.3f} | "
                f"{statistics.fmean(before):.2f} | {statistics.fmean(after):.3f} ± {_spread(after):.3f} | "
                f"{good} of {len(runs)} |"
            )
    return Table(lines, rows)


def correction_table(jobs: Sequence[Job], results: Results) -> Table:
    """Final score at each lag over that at lag 0, mean and standard deviation over seeds."""
    lags = sorted(lag for lag in _names(jobs, "lag") if lag)
    start = [final(run["scores"]) for run in _of(jobs, results, lag=0)]
    lines = [
        f"At lag 0 (all settings are the same): {statistics.fmean(start):.4f} ± {_spread(start):.4f}"
        if start
        else "lag 0 is missing",
        "| final over lag 0 | " + " | ".join(f"lag {lag}" for lag in lags) + " | held-out, largest lag |",
        "| --- " * (len(lags) + 2) + "|",
    ]
    rows = []
    for name in _names(jobs, "name"):
        if name == ON_POLICY or not start:
            continue
        row: dict[str, Any] = {"correction": name}
        cells = []
        for lag in lags:
            last = [final(run["scores"]) / statistics.fmean(start) for run in _of(jobs, results, name=name, lag=lag)]
            row[f"lag{lag}"] = round(statistics.fmean(last), 4) if last else None
            cells.append(f"{statistics.fmean(last):.3f} ± {_spread(last):.3f}" if last else "-")
        after = [run["heldout"][1] for run in _of(jobs, results, name=name, lag=lags[-1])]
        lines.append(f"| {name} | {' | '.join(cells)} | {f'{statistics.fmean(after):.3f}' if after else '-'} |")
        rows.append(row)
    return Table(lines, rows)


def last_line(algorithms: Sequence[Job], corrections: Sequence[Job], results: Results) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if algorithms:
        of_algorithms = algorithm_table(algorithms, results).rows
        found["improved"] = sum(row["improved"] for row in of_algorithms)
        found["improved_of"] = sum(row["of"] for row in of_algorithms)
        found["algorithms"] = of_algorithms
    if corrections:
        rows = correction_table(corrections, results).rows
        at_four = {row["correction"]: row["lag4"] for row in rows if row.get("lag4") is not None}
        corrected = {name: value for name, value in at_four.items() if name != UNCORRECTED}
        best = max(corrected, key=lambda name: corrected[name]) if corrected else None
        found["eta4_over_eta0_with_correction"] = corrected[best] if best else None
        found["best_correction"] = best
        found["eta4_over_eta0_ppo_clip"] = at_four.get(BASE)
        found["eta4_over_eta0_without"] = at_four.get(UNCORRECTED)
        start = [final(run["scores"]) for run in _of(corrections, results, lag=0)]
        found["eta0"] = round(statistics.fmean(start), 4) if start else None
        found["table"] = rows
    seconds = [results[job.key]["seconds"] for job in (*algorithms, *corrections) if job.key in results]
    if seconds:
        found["seconds_per_run"] = round(statistics.fmean(seconds), 1)
    return found


def draw(jobs: Sequence[Job], results: Results, file: Path) -> None:
    """Mean score of each step over seeds, smoothed over three steps, and the range of the seeds; PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    tasks, names = _names(jobs, "task"), _names(jobs, "name")
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(5.2 * len(tasks), 4.2), sharey=True, squeeze=False)
    for axis, task in zip(axes[0], tasks):
        for colour, name in zip(COLOURS, names):
            runs = [run["scores"] for run in _of(jobs, results, task=task, name=name)]
            if not runs:
                continue
            smooth = np.array([np.convolve(np.pad(run, 1, mode="edge"), np.ones(3) / 3, "valid") for run in runs])
            steps = np.arange(1, smooth.shape[1] + 1)
            axis.plot(steps, smooth.mean(axis=0), color=colour, linewidth=1.6, label=name)
            axis.fill_between(steps, smooth.min(axis=0), smooth.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axis.set(title=task, xlabel="optimizer step", ylim=(0, 1))
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("mean sampled reward (three steps)")
    axes[0][0].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    for suffix in (".png", ".svg"):
        figure.savefig(file.with_suffix(suffix), dpi=120)
    pyplot.close(figure)
