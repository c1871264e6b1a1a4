"""Scorers that look at the text of an answer. An unfinished answer scores 0, unless an option says otherwise."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Context, Decimal, InvalidOperation

from mindspeed_asyncflow.rewards.base import Answer


class Exact:
    """1 if the text equals the truth, without surrounding white space; else 0."""

    def __init__(self, ignore_case: bool = False) -> None:
        self.ignore_case = ignore_case

    def score(self, answer: Answer) -> float:
        text, truth = answer.text.strip(), answer.truth.strip()
        if self.ignore_case:
            text, truth = text.casefold(), truth.casefold()
        return float(answer.finished and text == truth)


class Format:
    """1 if the text has a form, right or wrong: a regular expression that all of it matches, or each of `tags` once,
    one after another (`<think>...</think><answer>...</answer>`), with nothing but white space around them."""

    def __init__(self, pattern: str | None = None, tags: Sequence[str] = ("think", "answer")) -> None:
        if isinstance(tags, str):
            raise ValueError(f"tags must be a list of names, not {tags!r}")
        if pattern is None:
            pattern = r"\s*".join(
                f"<{re.escape(tag)}>(?:(?!</?{re.escape(tag)}>).)*</{re.escape(tag)}>" for tag in tags
            )
        try:
            self.form = re.compile(rf"\s*(?:{pattern})\s*", re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error

    def score(self, answer: Answer) -> float:
        return float(answer.finished and self.form.fullmatch(answer.text) is not None)


# A sign right after a number, a name or a bracket is an operator: 3-5 ends with 5.
_NUMBER = re.compile(r"(?:(?<![\w)\]])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?%?")


def last_number(text: str) -> Decimal | None:
    """The last number of a text: `1,234.5`, `-3`, `.5`, `2e-3`, `40%` (as 40). None: it has none."""
    found = [m.group() for m in _NUMBER.finditer(text.replace("\u2212", "-")) if any(c.isdigit() for c in m.group())]
    if not found:
        return None
    try:
        return Decimal(found[-1].rstrip("%").replace(",", ""))
    except InvalidOperation:
        return None


_EXACT = Context(prec=60, traps=[])  # 1e9999999 - 4 is infinite, no error


class Number:
    """1 if the last number of the text is the last number of the truth, within `tolerance`; else 0.

    `relative`: the tolerance is a share of the truth. A truth without a number is an error.
    """

    def __init__(self, tolerance: float = 0.0, relative: bool = False) -> None:
        if tolerance < 0:
            raise ValueError(f"tolerance {tolerance} is negative")
        self.tolerance, self.relative = Decimal(str(tolerance)), relative

    def score(self, answer: Answer) -> float:
        right = last_number(answer.truth)
        if right is None or not right.is_finite():
            raise ValueError(f"the truth {answer.truth[:80]!r} holds no number")
        said = last_number(answer.text)
        if not answer.finished or said is None or not said.is_finite():
            return 0.0
        allowed = _EXACT.multiply(self.tolerance, right.copy_abs()) if self.relative else self.tolerance
        return float(_EXACT.subtract(said, right).copy_abs() <= allowed)


class Choice:
    """1 if the letter that the text chooses is that of the truth; else 0.

    The choice is, in this order: inside the last \\boxed{}; after the last "answer is" or "answer:"; the last letter in
    brackets; the whole text. Letters are those of `letters`, capital or small ("the answer is a matter of": none).
    """

    def __init__(self, letters: str = "ABCDEFGHIJ") -> None:
        if not letters or len(set(letters.upper())) != len(letters):
            raise ValueError(f"letters {letters!r} must be different ones")
        letter = f"([{re.escape(letters.upper() + letters.lower())}])"
        self.places = [
            re.compile(rf"\\boxed\s*{{\s*(?:\\text\s*{{)?\s*\(?{letter}\)?\s*}}?\s*}}"),
            re.compile(rf"answer\s*(?:is|:)\s*:?\s*[*(\[]*(?!(?-i:[a-z])\s+\w){letter}(?![A-Za-z])", re.IGNORECASE),
            re.compile(rf"[(\[]{letter}[)\]]"),
            re.compile(rf"\s*{letter}\s*[.)]?\s*"),
        ]

    def chosen(self, text: str) -> str | None:
        for place in self.places[:3]:
            if found := place.findall(text):
                return found[-1].upper()
        whole = self.places[3].fullmatch(text)
        return whole[1].upper() if whole else None

    def score(self, answer: Answer) -> float:
        right = self.chosen(answer.truth)
        if right is None:
            raise ValueError(f"the truth {answer.truth[:80]!r} names no letter")
        return float(answer.finished and self.chosen(answer.text) == right)


class Length:
    """Punishment of long answers, at most 0: 0 up to `free` tokens, -1 from `limit` on, between them linear or along
    half a cosine. Counts unfinished answers too."""

    def __init__(self, limit: int, free: int = 0, shape: str = "linear") -> None:
        if not 0 <= free < limit:
            raise ValueError(f"free {free} and limit {limit} must be 0 <= free < limit")
        if shape not in ("linear", "cosine"):
            raise ValueError(f"shape {shape!r} is unknown; there are: linear, cosine")
        self.limit, self.free, self.shape = limit, free, shape

    def score(self, answer: Answer) -> float:
        into = min(1.0, max(0.0, (answer.tokens - self.free) / (self.limit - self.free)))
        return -into if self.shape == "linear" else 0.5 * (math.cos(math.pi * into) - 1)
