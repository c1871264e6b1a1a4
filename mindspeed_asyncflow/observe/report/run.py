"""All that the report says about one run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mindspeed_asyncflow.config.load import load_config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.observe.bottleneck import Sizes, averaged, bottleneck
from mindspeed_asyncflow.observe.report.answers import Answer, read_answers
from mindspeed_asyncflow.observe.report.curves import Curves, read_curves, read_evaluations
from mindspeed_asyncflow.observe.report.histograms import Counts, read_lags, read_lengths
from mindspeed_asyncflow.observe.report.lanes import Lanes, read_lanes
from mindspeed_asyncflow.observe.report.settings import read_settings
from mindspeed_asyncflow.observe.report.warned import Warned, read_warnings
from mindspeed_asyncflow.observe.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Run:
    """What was read from a run folder; `missing`: what is not there, or not whole, in words."""

    name: str
    summary: dict[str, Any]
    held_back: str  # by what, in words; empty where the summary says it or nothing does
    curves: Curves
    evaluations: list[dict[str, Any]]
    lags: Counts
    lengths: Counts
    lanes: Lanes
    answers: list[Answer]
    settings: dict[str, Any]  # dotted key -> value
    config: str  # as it stands in the folder
    warnings: list[Warned]
    missing: list[str]


def read_run(folder: RunFolder, name: str) -> Run:
    missing: list[str] = []
    summary = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.exists() else {}
    if not summary:
        missing.append("summary.json: the run did not end, or was killed")
    curves = read_curves(folder.metrics, missing)
    evaluations = read_evaluations(folder.evaluations)
    settings, config = read_settings(folder.config, missing)
    return Run(
        name=name,
        summary=summary,
        held_back="" if summary else _held_back(folder, curves),
        curves=curves,
        evaluations=evaluations,
        lags=read_lags(folder.ledger, summary, missing),
        lengths=read_lengths(folder.events, missing),
        lanes=read_lanes(folder.trace, curves, missing),
        answers=read_answers(folder.samples, evaluations, missing),
        settings=settings,
        config=config,
        warnings=read_warnings(folder.log),
        missing=missing,
    )


def _held_back(folder: RunFolder, curves: Curves) -> str:
    steps = [{name: of_steps[n] for name, of_steps in curves.values.items()} for n in range(len(curves.steps))]
    try:
        return bottleneck(averaged(steps), Sizes.of(load_config(folder.config)))
    except ConfigError:
        return ""
