"""What a scorer gets and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to score."""

    text: str
    truth: str  # what the data says is right; its form is the scorer's business
    finished: bool  # the policy ended it itself
    prompt: Any = ""  # text or messages, before the chat template
    fields: dict[str, Any] = field(default_factory=dict)  # the prompt's other columns
    tokens: int = 0


@runtime_checkable
class Scorer(Protocol):
    """Lives in a scorer process. Whatever it raises is data on the answer, which then has no score."""

    def score(self, answer: Answer) -> float | None:
        """A finite number; None: this scorer abstains."""
        ...


@runtime_checkable
class BatchScorer(Protocol):
    """A scorer that is better asked about many answers at once; it keeps its own deadline for all of them."""

    def score_batch(self, answers: Sequence[Answer]) -> list[float | Exception | None]:
        """One result for each answer, in order; an exception stands for an answer that could not be scored."""
        ...
