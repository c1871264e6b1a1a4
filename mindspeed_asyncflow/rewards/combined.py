"""Several scorers, one number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_asyncflow.rewards.base import Answer, BatchScorer, Scorer


@dataclass(frozen=True, slots=True)
class Part:
    name: str  # of its metric
    weight: float
    scorer: Scorer | BatchScorer


@dataclass(frozen=True, slots=True)
class Result:
    value: float | None = None  # None without an error: all scorers abstained
    error: str = ""
    parts: dict[str, float] = field(default_factory=dict)  # what each scorer gave, before its weight


class Combined:
    """The weighted sum of scorers. One that abstains leaves the sum to the others, whose weights are scaled up so that
    all weights still add up to the same; one that fails leaves the answer without a score."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.total = sum(part.weight for part in parts)
        self.in_batches = any(isinstance(part.scorer, BatchScorer) for part in parts)

    def ask_batches(self, answers: Sequence[Answer]) -> dict[str, list[float | Exception | None]]:
        """What scorers that want many answers at once say, by name."""
        return {p.name: p.scorer.score_batch(answers) for p in self.parts if isinstance(p.scorer, BatchScorer)}

    def result(self, answer: Answer, known: dict[str, float | Exception | None]) -> Result:
        """`known`: what the others have said about this answer."""
        values: dict[str, float] = {}
        for part in self.parts:
            try:
                value = known[part.name] if isinstance(part.scorer, BatchScorer) else part.scorer.score(answer)
                if isinstance(value, Exception):
                    raise value
                if value is None:
                    continue
                number = float(value)
            except Exception as error:  # boundary: scorers are user code, their failures are data on the sample
                return Result(None, self._named(part, f"{type(error).__name__}: {error}"))
            if not math.isfinite(number):
                return Result(None, self._named(part, f"scorer returned {number}, not a finite number"))
            values[part.name] = number
        if not values:
            return Result()
        if len(self.parts) == 1:
            return Result(next(iter(values.values())) * self.total)
        asked = [part for part in self.parts if part.name in values]
        share = sum(part.weight for part in asked)
        if share == 0:
            return Result(None, "the weights of the scorers that did not abstain add up to 0", values)
        return Result(sum(p.weight * values[p.name] for p in asked) * self.total / share, "", values)

    def _named(self, part: Part, error: str) -> str:
        return f"{part.name}: {error}" if len(self.parts) > 1 else error
