"""What answers to evaluation prompts say about one policy version: figures, and the record of every answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_asyncflow.algorithms.estimates import maj_at_k, mean_at_k, pass_at_k

RIGHT = 1.0  # a score of so much or more passes
SHOWN = 5  # prompts whose answers the record shows as text


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer."""

    text: str
    score: float  # NaN: the scorer gave none


@dataclass(frozen=True, slots=True)
class Figures:
    """Of k answers to each of some prompts. NaN where no answer has a score."""

    mean_at_k: float  # over the answers that have a score
    pass_at_k: float  # share of prompts of whose answers one scores `RIGHT` or more
    maj_at_k: float  # mean score of each prompt's most frequent answer
    unscored: float  # share of answers without a score
    prompts: int

    @classmethod
    def of(cls, answers: Sequence[Sequence[Judged]]) -> Figures:
        """`answers`: [prompts][k]. Answers are the same if their texts are, white space around them aside."""
        scores = np.array([[a.score for a in row] for row in answers])
        texts = [[a.text.strip() for a in row] for row in answers]
        return cls(
            mean_at_k(scores),
            pass_at_k(scores, scores.shape[1]),
            maj_at_k(scores, texts),
            float(np.isnan(scores).mean()),
            len(answers),
        )

    def plain(self) -> dict[str, float | int | None]:
        values = {n: getattr(self, n) for n in ("mean_at_k", "pass_at_k", "maj_at_k", "unscored", "prompts")}
        return {name: _number(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One evaluation."""

    version: int  # of the policy, for every token of every answer
    temperature: float
    k: int
    seconds: float
    figures: Figures
    sources: Mapping[str, Figures] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """By the names of the table of metrics."""
        f = self.figures
        return {
            "eval/mean_at_k": f.mean_at_k,
            "eval/pass_at_k": f.pass_at_k,
            "eval/maj_at_k": f.maj_at_k,
            "eval/unscored": f.unscored,
            "eval/prompts": float(f.prompts),
            "eval/k": float(self.k),
            "eval/version": float(self.version),
            "eval/seconds": self.seconds,
        }

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        head = {"version": self.version, "temperature": self.temperature, "k": self.k, "seconds": self.seconds}
        return head | self.figures.plain() | {"sources": {name: f.plain() for name, f in self.sources.items()}}


def verdict_of(values: Mapping[str, Any]) -> Verdict:
    """From what `dataclasses.asdict` made of one."""
    sources = {name: Figures(**f) for name, f in values["sources"].items()}
    return Verdict(**{**values, "figures": Figures(**values["figures"]), "sources": sources})


def judge(
    version: int,
    temperature: float,
    seconds: float,
    answers: Sequence[Sequence[Judged]],
    prompts: Sequence[Mapping[str, str]],
) -> tuple[Verdict, dict[str, Any]]:
    """The verdict over `answers` [prompts][k], and the line of `evaluations.jsonl` with all scores.

    `prompts`: text, truth and source of each.
    """
    of_source: dict[str, list[Sequence[Judged]]] = {}
    for row, prompt in zip(answers, prompts):
        of_source.setdefault(prompt["source"], []).append(row)
    sources = {name: Figures.of(rows) for name, rows in of_source.items()}
    verdict = Verdict(version, temperature, len(answers[0]), round(seconds, 3), Figures.of(answers), sources)
    shown = [
        {**prompt, "answers": [a.text for a in row], "scores": [_number(a.score) for a in row]}
        for row, prompt in list(zip(answers, prompts))[:SHOWN]
    ]
    scores = [[_number(a.score) for a in row] for row in answers]
    of_prompt = {"source_of": [p["source"] for p in prompts]} if len(sources) > 1 else {}
    return verdict, verdict.plain() | of_prompt | {"scores": scores, "samples": shown}


def of_run(verdicts: Sequence[Verdict], version: int) -> dict[str, Any]:
    """Keys of `summary.json`: the first evaluation and the newest one, and what greedy answers scored, before training
    and at the run's last `version`."""
    first, last = (verdicts[0], verdicts[-1]) if verdicts else (None, None)
    before = first.figures.mean_at_k if first is not None and first.temperature == 0 else math.nan
    after = last.figures.mean_at_k if last is not None and last.temperature == 0 else math.nan
    return {
        "heldout_first": _number(before),
        "heldout_greedy": _number(after) if last is not None and last.version == version else None,
        "evaluation_first": None if first is None else first.plain(),
        "evaluation": None if last is None else last.plain(),
    }


def _number(value: float) -> float | int | None:
    return value if math.isfinite(value) else None
