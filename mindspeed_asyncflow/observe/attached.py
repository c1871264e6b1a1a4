"""A run that goes on, or is over, as its folder tells: what `asyncflow top` shows. Opens nothing for writing."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.config.feasibility import devices
from mindspeed_asyncflow.config.load import load_config
from mindspeed_asyncflow.observe.bottleneck import Sizes, averaged, bottleneck
from mindspeed_asyncflow.observe.report.curves import read_evaluations
from mindspeed_asyncflow.observe.run_folder import RunFolder

TAIL_BYTES = 1 << 19  # of metrics.jsonl: about a hundred steps
RECENT = 10  # steps that means are taken over
LAG_STEPS = 50  # steps whose lags are counted

Row = tuple[str, str]
# Title, then (label, metric, form) of each row.
SECTIONS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "learning",
        (
            ("reward", "reward/mean", "{:.3f}"),
            ("loss", "actor/loss", "{:+.4f}"),
            ("KL to reference", "actor/kl_loss", "{:.4f}"),
            ("KL rollout to trainer", "rollout_corr/k3_kl", "{:.2e}"),
            ("entropy", "actor/entropy", "{:.3f}"),
            ("gradient norm", "actor/grad_norm", "{:.3g}"),
            ("response tokens", "response_length/mean", "{:,.1f}"),
        ),
    ),
    (
        "speed",
        (
            ("tokens/s", "perf/tokens_per_s", "{:,.0f}"),
            ("tokens/s per device", "perf/tokens_per_s_per_device", "{:,.1f}"),
            ("generated tokens/s", "perf/gen_tokens_per_s", "{:,.0f}"),
            ("answers/s", "perf/samples_per_s", "{:,.1f}"),
            ("seconds per step", "timing_s/step", "{:,.2f}"),
        ),
    ),
    (
        "waiting",
        (
            ("trainer idle", "idle/trainer", "{:.0%}"),
            ("rollout idle", "idle/rollout", "{:.0%}"),
            ("prompts for rollout", "queue/rollout", "{:,.0f}"),
            ("answers for a score", "queue/reward", "{:,.0f}"),
            ("answers for the trainer", "queue/train", "{:,.0f}"),
            ("dock in use", "dock/used_ratio", "{:.0%}"),
            ("versions behind", "weight_sync/behind_max", "{:.0f}"),
        ),
    ),
)
MEANS = ("reward/mean", "perf/tokens_per_s", "idle/trainer", "idle/rollout")  # shown beside the newest value


@dataclass(frozen=True, slots=True)
class View:
    """`state`: running, starting, ended, failed, stopped, lost, or, of a simulation, simulated. `alive`: more may
    come."""

    name: str
    state: str
    words: str  # what the state is about; may be empty
    steps: int  # made
    wanted: int
    ran_s: float | None  # since the first step's end, or of the whole run where it is over
    left_s: float | None
    sections: list[tuple[str, list[Row]]]
    rewards: list[float]  # of the last steps
    lags: dict[int, int] = field(default_factory=dict)  # versions -> trained answers of the last steps
    bottleneck: str = ""

    @property
    def alive(self) -> bool:
        return self.state in ("running", "starting")


def look(
    folder: RunFolder,
    driver: Callable[[], bool | None],
    now: float | None = None,
    waiting: Mapping[str, int] | None = None,
) -> View:
    """`driver`: whether the driver lives; None: nobody can tell here. `now`: epoch seconds. `waiting`: rows by task
    that wait in the dock at this moment, in place of those at the end of the newest step. Raises ConfigError where the
    folder's settings cannot be read."""
    now = time.time() if now is None else now
    config = load_config(folder.config)
    records = tail(folder.metrics)
    summary = _summary(folder.summary)
    steps = int(records[-1]["step"]) + 1 if records else 0
    simulated = folder.simulated.is_file()
    wanted = config.simulation.steps if simulated else config.trainer.steps
    state, words = _state(folder, summary, steps, driver, now)
    times = [float(record["time"]) for record in records]
    alive = state in ("running", "starting")
    ran = summary.get("wall_s") if summary else _ran(folder.metrics, now if alive else None, times)
    if records and "perf/tokens_per_s_per_device" not in records[-1] and records[-1].get("perf/tokens_per_s"):
        records[-1]["perf/tokens_per_s_per_device"] = records[-1]["perf/tokens_per_s"] / devices(config)
    return View(
        name=folder.path.resolve().name,
        state=state,
        words=words,
        steps=steps,
        wanted=wanted,
        ran_s=None if simulated else ran,  # its steps end at virtual times
        left_s=time_left(times, steps, wanted, now) if alive else None,
        sections=_sections(records, read_evaluations(folder.evaluations), waiting or {}),
        rewards=[r["reward/mean"] for r in records if r.get("reward/mean") is not None],
        lags=recent_lags(folder.ledger, steps - LAG_STEPS),
        bottleneck=bottleneck(averaged(records[-RECENT:]), Sizes.of(config)),
    )


def tail(path: Path) -> list[dict[str, Any]]:
    """The last steps of `metrics.jsonl`, oldest first. A line that is being written is left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    records = []
    for line in lines[1:] if size > TAIL_BYTES else lines:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def time_left(times: Sequence[float], steps: int, wanted: int, now: float) -> float | None:
    """From the median of the last steps, so that a pause of the run does not count."""
    if len(times) < 2 or steps >= wanted:
        return None
    pace = statistics.median(later - earlier for earlier, later in pairwise(times))
    return max(0.0, pace * (wanted - steps) - max(0.0, now - times[-1]))


def recent_lags(ledger: Path, since: int) -> dict[int, int]:
    """Trained answers by lag of their oldest token, from step `since` on; empty where no ledger can be read."""
    query = (
        "SELECT step - oldest, COUNT(*) FROM trained JOIN note USING (seq) "
        "WHERE undone IS NULL AND step >= ? GROUP BY 1 ORDER BY 1"
    )
    if not ledger.is_file():
        return {}
    place = f"{ledger.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(place, uri=True, timeout=5)) as db:
            return {int(lag): int(count) for lag, count in db.execute(query, (since,)) if lag is not None}
    except sqlite3.Error:  # it is being made, or of another release
        return {}


def _summary(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _state(
    folder: RunFolder, summary: Mapping[str, Any], steps: int, driver: Callable[[], bool | None], now: float
) -> tuple[str, str]:
    if folder.simulated.is_file():
        return "simulated", f"by `asyncflow simulate`, no run that could go on; its figures: {folder.simulated}"
    if summary:
        error = str(summary.get("error") or "")
        if error.startswith("Interrupted"):
            return "stopped", "by its client" if "by its client" in error else "by a signal"
        return ("failed", error) if error else ("ended", str(summary.get("note") or ""))
    lives = driver()
    if lives is False:
        again = f"the same command with --run-folder {folder.path} goes on"
        return "lost", f"its driver is gone without a summary; {again}"
    where = "" if lives else "whether its driver lives cannot be told on this node"
    return ("running" if steps else "starting"), where


def _ran(path: Path, now: float | None, times: Sequence[float]) -> float | None:
    """Since the end of the first step."""
    if not times:
        return None
    with path.open("rb") as file:
        try:
            first = float(json.loads(file.readline())["time"])
        except (ValueError, KeyError, TypeError):
            return None
    return (times[-1] if now is None else now) - first


def _sections(
    records: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], waiting: Mapping[str, int]
) -> list[tuple[str, list[Row]]]:
    found = [(title, _rows(records, rows, waiting)) for title, rows in SECTIONS]
    if evaluations and (value := evaluations[-1].get("mean_at_k")) is not None:
        found[0][1].insert(1, ("held-out", f"{value:.3f}  (version {evaluations[-1]['version']})"))
    return [(title, rows) for title, rows in found if rows]


def _rows(
    records: Sequence[Mapping[str, Any]], rows: Sequence[tuple[str, str, str]], waiting: Mapping[str, int]
) -> list[Row]:
    found = []
    for label, name, form in rows:
        if name.startswith("queue/") and (count := waiting.get(name.removeprefix("queue/"))) is not None:
            found.append((label, f"{form.format(count)}  (now)"))
            continue
        values = [v for record in records[-RECENT:] if (v := record.get(name)) is not None and math.isfinite(v)]
        if not records or name not in records[-1]:
            continue
        newest = records[-1][name]
        text = form.format(newest) if newest is not None else "n/a"
        if name in MEANS and len(values) > 1:
            text += f"  ({len(values)}-step mean {form.format(sum(values) / len(values))})"
        found.append((label, text))
    return found
