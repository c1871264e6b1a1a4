"""Several scorers, one number."""

from __future__ import annotations

import math
import threading
import time
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
    their sizes (without signs) add up to the same; one that fails leaves the answer without a score."""

    def __init__(self, parts: Sequence[Part], timeout_s: float = 5.0) -> None:
        self.parts = parts
        self.limit_s = 0.9 * timeout_s  # the pool would end the whole process at timeout_s
        self.in_batches = any(isinstance(part.scorer, BatchScorer) for part in parts)

    def ask_batches(self, answers: Sequence[Answer]) -> dict[str, list[float | Exception | None]]:
        """What scorers that want many answers at once say, by name, all asked at the same time. One that does not keep
        its own deadline (a resolver that hangs, say) is not waited for: its answers have a `TimeoutError`."""
        late = TimeoutError(f"no scores within {self.limit_s:g} s")
        asked = [p for p in self.parts if isinstance(p.scorer, BatchScorer)]
        found: dict[str, list[float | Exception | None]] = {p.name: [late] * len(answers) for p in asked}

        def ask(name: str, scorer: BatchScorer) -> None:
            try:
                found[name] = scorer.score_batch(answers)
            except Exception as error:  # boundary: as below, a failure is data on the samples
                found[name] = [error] * len(answers)

        threads = [threading.Thread(target=ask, args=(p.name, p.scorer), daemon=True) for p in asked]
        ends = time.monotonic() + self.limit_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
        return dict(found)

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
            return Result(next(iter(values.values())) * self.parts[0].weight)
        asked = [part for part in self.parts if part.name in values]
        share = sum(abs(part.weight) for part in asked)
        if share == 0:
            return Result(None, "the scorers that did not abstain have no weight", values)
        total = sum(abs(part.weight) for part in self.parts)
        return Result(sum(p.weight * values[p.name] for p in asked) * total / share, "", values)

    def _named(self, part: Part, error: str) -> str:
        return f"{part.name}: {error}" if len(self.parts) > 1 else error
