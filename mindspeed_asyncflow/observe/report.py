"""`report.html`: one self-contained page about a run, from what lies in its folder. Missing pieces are named."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.observe.charts import Bar, Series, bar_chart, gantt, line_chart
from mindspeed_asyncflow.observe.metrics import BY_NAME
from mindspeed_asyncflow.observe.page import page
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.summary import closing_words, duration
from mindspeed_asyncflow.observe.trace import read_events, sub_lane

History = dict[str, list[tuple[int, float]]]  # metric name -> (step, value; NaN where it was not finite)

_CURVES: tuple[tuple[str, dict[str, str], dict[str, Any]], ...] = (  # title, {metric: label}, options
    ("Lag, oldest token", {"staleness/worst_max": "largest", "staleness/worst_mean": "mean"}, {"ceiling": 1}),
    (
        "Response length",
        {"response_length/mean": "mean", "response_length/max": "longest", "response_length/min": "shortest"},
        {},
    ),
    ("Idle", {"idle/trainer": "trainer", "idle/rollout": "rollout"}, {"percent": True, "ceiling": 1}),
    ("Throughput", {"perf/tokens_per_s": "tokens trained"}, {}),
    ("Throughput", {"perf/samples_per_s": "answers trained"}, {}),
    ("Entropy", {"actor/entropy": "policy"}, {}),
    ("Gradient norm", {"actor/grad_norm": "before clipping"}, {}),
    (
        "Trainer against rollout",
        {"rollout_corr/k3_kl": "k3 KL", "rollout_corr/abs_diff_mean": "mean |difference|"},
        {},
    ),
)
_GANTT_STEPS = 3
_GANTT_BARS = 4000


def write_report(run_folder: Path | str) -> Path:
    """Write `report.html` into `run_folder` and return its path."""
    folder = RunFolder(Path(run_folder))
    history, times = read_history(folder.metrics)
    summary = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.exists() else {}
    missing: list[str] = []
    if not summary:
        missing.append("summary.json: the run did not end, or was killed")
    if not history:
        missing.append("metrics.jsonl: no step was finished")
    sections = [
        _head(summary),
        _cards(summary, history),
        _charts(summary, history, read_evaluations(folder.evaluations)),
        _lanes(folder, times, missing),
        _samples(folder, missing),
        _table(history),
        _config(folder, missing),
    ]
    if missing:
        items = "".join(f"<li>{escape(text)}</li>" for text in missing)
        sections.insert(2, f'<section class="missing"><h2>Not in this report</h2><ul>{items}</ul></section>')
    temporary = folder.report.with_suffix(".tmp")
    temporary.write_text(page(folder.path.resolve().name, "".join(sections)), encoding="utf-8")
    os.replace(temporary, folder.report)
    return folder.report


def read_history(path: Path) -> tuple[History, dict[int, float]]:
    """Curves of `metrics.jsonl`, and the wall clock (epoch s) at which each step was written first."""
    history: History = {}
    times: dict[int, float] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines) - 1:  # cut off when the process was killed
                break
            raise
        step = int(record.pop("step"))
        times.setdefault(step, float(record.pop("time")))
        for name, value in record.items():
            history.setdefault(name, []).append((step, math.nan if value is None else float(value)))
    return history, times


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Whole lines of `evaluations.jsonl`."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _head(summary: dict[str, Any]) -> str:
    if not summary:
        return "<p class='words'>This run has no summary.</p>"
    kind = "words failed" if summary.get("error") else "words"
    return f'<p class="{kind}">{escape(closing_words(summary)).replace(chr(10), "<br>")}</p>'


def _cards(summary: dict[str, Any], history: History) -> str:
    def last(name: str) -> float | None:
        return history[name][-1][1] if name in history else None

    values: list[tuple[str, Any, Callable[[Any], str]]] = [
        ("reward at the start", summary.get("reward_first"), "{:.3f}".format),
        ("reward at the end", summary.get("reward_last"), "{:.3f}".format),
        ("held-out", (summary.get("evaluation") or {}).get("mean_at_k", last("eval/mean_at_k")), "{:.3f}".format),
        ("steps", summary.get("steps"), "{:d}".format),
        ("time", summary.get("wall_s"), duration),
        ("answers trained", summary.get("samples_trained"), "{:,d}".format),
        ("answers dropped", summary.get("samples_dropped"), "{:,d}".format),
        ("largest lag", summary.get("max_lag"), "{:g}".format),
        ("answers/s", summary.get("samples_per_s", last("perf/samples_per_s")), "{:,.0f}".format),
        ("trainer idle", summary.get("trainer_idle_share", last("idle/trainer")), "{:.0%}".format),
        ("rollout idle", summary.get("rollout_idle_share", last("idle/rollout")), "{:.0%}".format),
        ("log-prob gap", summary.get("rollout_train_logprob_gap_max"), "{:.1e}".format),
    ]
    cards = [
        f'<div class="card"><b>{escape(form(value))}</b><span>{escape(label)}</span></div>'
        for label, value, form in values
        if value is not None and not (isinstance(value, float) and math.isnan(value))
    ]
    return f'<section class="cards">{"".join(cards)}</section>' if cards else ""


def _charts(summary: dict[str, Any], history: History, evaluations: Sequence[dict[str, Any]]) -> str:
    reward = _reward_series(history, evaluations)
    figures = [_figure("Reward", "score", line_chart(reward))] if reward else []
    histogram = {str(lag): count for lag, count in (summary.get("lag_histogram") or {}).items()}
    if any(histogram.values()):
        lags = sorted(histogram, key=int)
        bars = bar_chart(lags, [histogram[lag] for lag in lags], x_label="lag in versions, oldest token", color=4)
        figures.append(_figure("Trained answers by lag", "answers", bars))
    for title, labels, options in _CURVES:
        series = [Series(label, history[n], i) for i, (n, label) in enumerate(labels.items()) if _drawable(history, n)]
        if series:
            figures.append(_figure(title, BY_NAME[next(iter(labels))].unit, line_chart(series, **options)))
    if not figures:
        return ""
    return f'<section><h2>Curves</h2><div class="grid2">{"".join(figures)}</div></section>'


def _figure(title: str, unit: str, chart: str) -> str:
    small = "" if unit == "1" else f" <small>{escape(unit)}</small>"
    return f"<figure><figcaption>{escape(title)}{small}</figcaption>{chart}</figure>"


def _drawable(history: History, name: str) -> bool:
    return any(math.isfinite(value) for _, value in history.get(name, ()))


def _reward_series(history: History, evaluations: Sequence[dict[str, Any]]) -> list[Series]:
    series = []
    if _drawable(history, "reward/mean"):
        points = history["reward/mean"]
        series.append(Series("sampled, each step", points, 0, "faint" if len(points) > 8 else "line"))
        if len(points) > 8:
            series.append(Series("sampled, mean of 5 steps", _moving_mean(points, 5), 0))
    heldout = [(e["version"], e["mean_at_k"]) for e in evaluations if e["mean_at_k"] is not None]
    if heldout:
        label = f"held-out, mean@{evaluations[-1]['k']}" if evaluations[-1]["temperature"] else "held-out, greedy"
        series.append(Series(label, heldout, 1, "dots" if len(heldout) < 3 else "line"))
    return series


def _moving_mean(points: Sequence[tuple[int, float]], size: int) -> list[tuple[int, float]]:
    result = []
    for i, (step, _) in enumerate(points):
        window = [y for _, y in points[max(0, i - size + 1) : i + 1] if math.isfinite(y)]
        result.append((step, sum(window) / len(window) if window else math.nan))
    return result


def _lanes(folder: RunFolder, times: dict[int, float], missing: list[str]) -> str:
    spans = [e for e in read_events(folder.trace) if e["kind"] == "X"] if folder.trace.exists() else []
    if not spans:
        missing.append("trace/: no spans (observe.trace is off, or no process wrote any)")
        return ""
    begin, end, marks = _window(spans, times)
    rows: dict[tuple[str, str, int], list[Bar]] = {}
    ends: dict[tuple[str, str], list[list[int]]] = {}
    for e in spans:
        if e["start_us"] + e["dur_us"] <= begin or e["start_us"] >= end:
            continue
        key = (e["process"], e["lane"])
        levels = ends.setdefault(key, [])
        level = sub_lane(levels, e["start_us"], e["dur_us"])
        detail = " ".join(f"{k}={v}" for k, v in e["args"].items())
        start = (e["start_us"] - begin) / 1e6
        bar = Bar(e["name"], start, start + e["dur_us"] / 1e6, len(levels[level]) - 1, detail)
        rows.setdefault((*key, level), []).append(bar)
    count = sum(len(bars) for bars in rows.values())
    if count > _GANTT_BARS:
        longest = sorted((b.end_s - b.start_s for bars in rows.values() for b in bars), reverse=True)[_GANTT_BARS]
        rows = {key: [b for b in bars if b.end_s - b.start_s > longest] for key, bars in rows.items()}
        missing.append(f"lanes: only the {_GANTT_BARS} longest of {count} spans are drawn; all are in trace/")
    lanes = [(_lane_label(*key), rows[key]) for key in sorted(rows)]
    chart = gantt(lanes, (end - begin) / 1e6, marks)
    return (
        "<section><h2>Who worked when</h2><p>A few steps from the middle of the run; gaps are idle. For the whole run "
        f"open trace/trace.json in chrome://tracing or ui.perfetto.dev.</p><figure>{chart}</figure></section>"
    )


def _lane_label(process: str, lane: str, level: int) -> str:
    if level:
        return ""
    return process if lane in (process, "main") else f"{process} · {lane}"


def _window(spans: Sequence[dict[str, Any]], times: dict[int, float]) -> tuple[int, int, list[tuple[float, str]]]:
    """Start and end in epoch µs of the steps in the middle of the run, and where each of them ended."""
    steps = sorted(times)
    first = max(0, (len(steps) - _GANTT_STEPS) // 2)
    chosen = steps[first : first + _GANTT_STEPS + 1]
    if len(chosen) >= 2 and times[chosen[-1]] > times[chosen[0]]:
        begin, end = int(times[chosen[0]] * 1e6), int(times[chosen[-1]] * 1e6)
        if any(e["start_us"] < end and e["start_us"] + e["dur_us"] > begin for e in spans):
            return begin, end, [(times[s] - times[chosen[0]], f"step {s} done") for s in chosen[:-1]]
    begin = spans[0]["start_us"]
    end = max(e["start_us"] + e["dur_us"] for e in spans)
    middle = (begin + end) // 2
    half = min(2_500_000, max(1, (end - begin) // 2))
    return middle - half, middle + half, []


def _samples(folder: RunFolder, missing: list[str]) -> str:
    files = sorted(folder.samples.glob("step_*.txt")) if folder.samples.exists() else []
    if not files:
        missing.append("samples/: no answers were written (observe.samples_per_step)")
        return ""
    chosen = files if len(files) == 1 else [files[0], files[-1]]
    texts = "".join(
        f"<div><h3>step {int(path.stem[5:])}</h3><pre>{escape(path.read_text(encoding='utf-8')[:3000])}</pre></div>"
        for path in chosen
    )
    return f'<section><h2>Answers, first and last</h2><div class="grid2">{texts}</div></section>'


def _table(history: History) -> str:
    if not history:
        return ""
    rows = []
    for name, metric in BY_NAME.items():
        if name in history:
            first, last = history[name][0][1], history[name][-1][1]
            rows.append(
                f"<tr><td><code>{escape(name)}</code></td><td class='n'>{first:.4g}</td><td class='n'>{last:.4g}</td>"
                f"<td>{escape(metric.unit)}</td><td>{escape(metric.definition)}</td></tr>"
            )
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>unit</th><th>definition</th></tr>"
    return f'<section><h2>Metrics</h2><div class="scroll"><table>{head}{"".join(rows)}</table></div></section>'


def _config(folder: RunFolder, missing: list[str]) -> str:
    if not folder.config.exists():
        missing.append("config.yaml: the resolved configuration")
        return ""
    text = escape(folder.config.read_text(encoding="utf-8"))
    return f"<section><details><summary>Resolved configuration</summary><pre>{text}</pre></details></section>"
