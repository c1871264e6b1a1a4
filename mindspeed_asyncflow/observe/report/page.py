"""The frame of the report: head, warnings and data as HTML; the scripts beside this file draw the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from html import escape
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.observe.metrics import BY_NAME
from mindspeed_asyncflow.observe.report.histograms import PARTS, binned
from mindspeed_asyncflow.observe.report.run import Run
from mindspeed_asyncflow.observe.report.settings import seeds_of_one, settings_table
from mindspeed_asyncflow.observe.summary import closing_words, duration

_FILES = Path(__file__).parent
SCRIPTS = ("tools.js", "curves.js", "bars.js", "lanes.js", "answers.js", "tables.js")
# Whatever a text of a run says, the page fetches nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"

FIGURES: tuple[tuple[str, dict[str, str], dict[str, Any]], ...] = (  # title, {metric: label}, options
    ("Reward", {"reward/mean": "sampled"}, {"heldout": True}),
    ("Lag, oldest token", {"staleness/worst_max": "largest", "staleness/worst_mean": "mean"}, {"ceiling": 1}),
    (
        "Response length",
        {"response_length/mean": "mean", "response_length/max": "longest", "response_length/min": "shortest"},
        {},
    ),
    ("Idle", {"idle/trainer": "trainer", "idle/rollout": "rollout"}, {"percent": True, "ceiling": 1}),
    ("Tokens trained", {"perf/tokens_per_s": "tokens"}, {}),
    ("Answers trained", {"perf/samples_per_s": "answers"}, {}),
    ("Loss", {"actor/pg_loss": "policy"}, {}),
    ("Entropy", {"actor/entropy": "policy"}, {}),
    ("Gradient norm", {"actor/grad_norm": "before clipping"}, {}),
    (
        "Trainer against rollout",
        {"rollout_corr/k3_kl": "k3 KL", "rollout_corr/abs_diff_mean": "mean |difference|"},
        {},
    ),
)


def page(runs: Sequence[Run]) -> str:
    """The whole file; the first run is the one that it is about."""
    title = " · ".join(run.name for run in runs)
    style, data = (_FILES / "page.css").read_text(encoding="utf-8"), _data(runs)
    scripts = "".join((_FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    head = _words(runs) + _figures(runs) + _missing(runs) + _warnings(runs)
    body = (_FILES / "page.html").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main><h1>{escape(title)}</h1><nav id='parts'></nav>{head}{body}{_configs(runs)}</main>"
        f'<script type="application/json" id="data">{data}</script><script>"use strict";\n{scripts}</script>'
        "</body></html>\n"
    )


def _data(runs: Sequence[Run]) -> str:
    experiments = seeds_of_one([run.settings for run in runs])
    data = {
        "runs": [
            {
                "name": run.name,
                "seed": run.settings.get("run.seed"),
                "experiment": experiment,
                "steps": run.curves.steps,
                "times": [round(t - run.curves.times[0], 3) for t in run.curves.times],
                "values": run.curves.values,
                "heldout": _heldout(run),
                "lags": binned(run.lags),
                "lengths": binned(run.lengths),
                "lanes": asdict(run.lanes),
                "answers": [astuple(answer) for answer in run.answers],
            }
            for run, experiment in zip(runs, experiments)
        ],
        "figures": FIGURES,
        "parts": PARTS,
        "metrics": {name: [m.unit, m.definition] for name, m in BY_NAME.items()},
        "settings": [asdict(row) for row in settings_table([run.settings for run in runs])],
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")  # no text can end the element


def _heldout(run: Run) -> dict[str, Any]:
    """Evaluations by the version that they measured."""
    points = [(e["version"], e["mean_at_k"]) for e in run.evaluations if e["mean_at_k"] is not None]
    if not points:
        return {"label": "", "points": []}
    sampled = run.evaluations[-1]["temperature"]
    return {
        "label": f"held-out, mean@{run.evaluations[-1]['k']}" if sampled else "held-out, greedy",
        "points": points,
    }


def _words(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        name = f"<b>{escape(run.name)}</b><br>" if len(runs) > 1 else ""
        kind = "words failed" if run.summary.get("error") else "words"
        words = closing_words(run.summary) if run.summary else "This run has no summary: it goes on, or was killed."
        if run.held_back:
            words += f"\nWhat holds it back: {run.held_back}."
        parts.append(f'<p class="{kind}">{name}{escape(words).replace(chr(10), "<br>")}</p>')
    return "".join(parts)


def _figures(runs: Sequence[Run]) -> str:
    """Cards for one run, a table for several."""
    found = [_numbers(run) for run in runs]
    if len(runs) == 1:
        cards = "".join(
            f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
            for label, value in found[0].items()
        )
        return f'<section class="cards">{cards}</section>' if cards else ""
    labels = dict.fromkeys(label for numbers in found for label in numbers)
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = ""
    for label in labels:
        values = "".join(_cell(numbers.get(label, "—")) for numbers in found)
        rows += f"<tr><th>{escape(label)}</th>{values}</tr>"
    return f'<section class="scroll"><table><tr><th></th>{head}</tr>{rows}</table></section>'


def _numbers(run: Run) -> dict[str, str]:
    summary, last = run.summary, run.curves.last
    values: list[tuple[str, Any, Callable[[Any], str]]] = [
        ("reward at the start", summary.get("reward_first", run.curves.first("reward/mean")), "{:.3f}".format),
        ("reward at the end", summary.get("reward_last", last("reward/mean")), "{:.3f}".format),
        ("held-out", (summary.get("evaluation") or {}).get("mean_at_k", last("eval/mean_at_k")), "{:.3f}".format),
        ("steps", summary.get("steps", len(run.curves.steps) or None), "{:d}".format),
        ("time", summary.get("wall_s"), duration),
        ("answers trained", summary.get("samples_trained"), "{:,d}".format),
        ("answers dropped", summary.get("samples_dropped"), "{:,d}".format),
        ("largest lag", summary.get("max_lag"), "{:g}".format),
        ("answers/s", summary.get("samples_per_s", last("perf/samples_per_s")), _rate),
        ("trainer idle", summary.get("trainer_idle_share", last("idle/trainer")), "{:.0%}".format),
        ("rollout idle", summary.get("rollout_idle_share", last("idle/rollout")), "{:.0%}".format),
        ("log-prob gap", summary.get("rollout_train_logprob_gap_max"), "{:.1e}".format),
    ]
    return {label: form(value) for label, value, form in values if value is not None and math.isfinite(value)}


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _missing(runs: Sequence[Run]) -> str:
    named = [f"{run.name}: {text}" if len(runs) > 1 else text for run in runs for text in run.missing]
    if not named:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in named)
    return f'<section class="missing"><h2>Not in this report</h2><ul>{items}</ul></section>'


def _warnings(runs: Sequence[Run]) -> str:
    several = len(runs) > 1
    rows = [
        f"<tr class='{w.level}'><td class='when'>{escape(w.first)}</td>{_cell(run.name) if several else ''}"
        f"<td>{escape(w.process)}</td><td>{w.level}</td><td class='n'>{w.times}</td>"
        f"<td class='text'>{escape(w.text)}</td></tr>"
        for run in runs
        for w in run.warnings
    ]
    if not rows:
        return '<section id="warnings"><h2>Warnings</h2><p>None.</p></section>'
    names = ["first", *(["run"] if several else []), "process", "level", "times", "words"]
    head = "".join(f"<th{' class=n' if name == 'times' else ''}>{name}</th>" for name in names)
    table = f'<div class="scroll low"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    return f'<section id="warnings"><h2>Warnings</h2>{table}</section>'


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _configs(runs: Sequence[Run]) -> str:
    return "".join(
        f"<section><details><summary>config.yaml of {escape(run.name)}</summary><pre>{escape(run.config)}</pre>"
        "</details></section>"
        for run in runs
        if run.config
    )
