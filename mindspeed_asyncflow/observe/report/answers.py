"""Answers as text: those trained on (`samples/`) and those of evaluations."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 3_000_000  # of all texts of a run
_HEAD = re.compile(r"--- step (\d+) \| version (-?\d+) \| lag (-?\d+) \| reward (\S+)(?: \| prompt \d+:\d+)?")
_STARTS = {"prompt: ": "prompt", "answer: ": "answer", "truth:  ": "truth"}
_INDENT = " " * 8


@dataclass(frozen=True, slots=True)
class Answer:
    """`step`: that trained it, or None for one of an evaluation. `version`: of its oldest token, or evaluated."""

    step: int | None
    version: int
    lag: int | None
    score: float | None
    prompt: str
    answer: str
    truth: str


def read_answers(folder: Path, evaluations: Sequence[dict[str, Any]], missing: list[str]) -> list[Answer]:
    """In order of the run. Where the texts are too many, steps are left out evenly."""
    files = sorted(folder.glob("step_*.txt")) if folder.exists() else []
    if not files:
        missing.append("samples/: no answers were written (observe.samples_per_step)")
    trained = [parse_samples(path.read_bytes().decode("utf-8", "replace")) for path in files]
    tested = [_of_evaluation(record) for record in evaluations]
    batches = [batch for batch in trained + tested if batch]
    size = sum(_size(batch) for batch in batches)
    if size > MOST_CHARACTERS:
        stride = -(-size // MOST_CHARACTERS)
        kept = batches[::stride]
        missing.append(f"answers: those of {len(kept)} of {len(batches)} steps and evaluations are on this page")
        batches = kept
    return [answer for batch in batches for answer in batch]


def parse_samples(text: str) -> list[Answer]:
    """What `SamplesWriter` wrote: a head, then fields whose further lines are indented. Other lines are passed over."""
    answers: list[Answer] = []
    heads: list[tuple[str, ...]] = []
    bodies: list[dict[str, list[str]]] = []
    lines: list[str] = []  # of the field that is read
    for line in text.split("\n"):
        if match := _HEAD.fullmatch(line):
            heads.append(match.groups())
            bodies.append({name: [] for name in _STARTS.values()})
        elif heads and line[:8] in _STARTS:
            lines = bodies[-1][_STARTS[line[:8]]]
            lines.append(line[8:])
        elif heads and line.startswith(_INDENT):
            lines.append(line[8:])
    for (step, version, lag, reward), body in zip(heads, bodies):
        texts = {name: "\n".join(part) for name, part in body.items()}
        answers.append(Answer(int(step), int(version), int(lag), _score(float(reward)), **texts))
    return answers


def _of_evaluation(record: dict[str, Any]) -> list[Answer]:
    return [
        Answer(None, record["version"], None, _score(score), sample["prompt"], answer, str(sample.get("truth", "")))
        for sample in record.get("samples", ())
        for answer, score in zip(sample["answers"], sample["scores"])
    ]


def _score(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _size(batch: Sequence[Answer]) -> int:
    return sum(len(each.prompt) + len(each.answer) + len(each.truth) for each in batch)
