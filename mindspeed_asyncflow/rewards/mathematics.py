"""Equality of mathematical answers, by the library math-verify."""

from __future__ import annotations

import importlib
from typing import Any

from mindspeed_asyncflow.errors import RewardError
from mindspeed_asyncflow.rewards.base import Answer

_MARKS = ("$", "\\boxed", "\\(", "\\[")  # what stands around mathematics in a text


class Math:
    """1 if the final answer of the text is mathematically equal to the truth; else 0.

    The library finds the answer: the last \\boxed{} first, else LaTeX or an expression. Its own time-outs use signals,
    which work in the main thread of a process only, so they are off: the pool's deadline ends what does not end.
    """

    def __init__(self) -> None:
        try:
            self.library: Any = importlib.import_module("math_verify")
        except ImportError as error:
            raise RewardError(f"scorer math needs math-verify ({error}): pip install math-verify") from error

    def parsed(self, text: str) -> list[Any]:
        return self.library.parse(text, parsing_timeout=None)

    def right(self, truth: str) -> list[Any]:
        """Of a truth without marks the whole is meant: bare, `2\\pi` would be read as the number 2."""
        whole, marked = f"${truth}$", any(mark in truth for mark in _MARKS)
        first, second = (truth, whole) if marked else (whole, truth)
        return self.parsed(first) or self.parsed(second)

    def score(self, answer: Answer) -> float:
        right = self.right(answer.truth)
        if not right:
            raise ValueError(f"the truth {answer.truth[:80]!r} is no mathematical expression")
        if not answer.finished:
            return 0.0
        return float(self.library.verify(right, self.parsed(answer.text), timeout_seconds=None, raise_on_error=True))
