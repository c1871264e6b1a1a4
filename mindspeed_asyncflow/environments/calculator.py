"""A calculator that the model calls: exact arithmetic on bounded numbers, parsed by hand.

sum     = product { ("+" | "-") product }
product = sign { ("*" | "/") sign }
sign    = { "+" | "-" } value
value   = number | "(" sum ")"
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from mindspeed_asyncflow.environments.base import Turn
from mindspeed_asyncflow.errors import RewardError

LONGEST = 200  # characters of an expression
LARGEST = 10**30  # of numerators and denominators on the way
_PLACES = 12  # decimals of a result that is no whole number
_TOKEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+|[-+*/()])", re.ASCII)


class BadExpression(ValueError):
    """It cannot be calculated; the message says why."""


class Calculator:
    """Replies with the value of the last call in the model's last turn; a turn without a call ends the conversation.

    A call stands between `open` and `close`. An empty `open` is the beginning of the turn and an empty `close` its end.
    `wrong` is the reply to what cannot be calculated; None: it says why.
    """

    def __init__(self, open: str = "<calc>", close: str = "</calc>", wrong: str | None = None) -> None:
        if open and open == close:
            raise RewardError(f"turns.options: open and close of the calculator are both {open!r}; make them differ")
        self.open, self.close, self.wrong = open, close, wrong

    def reply(self, turns: Sequence[Turn], truth: str, fields: dict[str, Any]) -> str | None:
        call = self.call(turns[-1].text)
        if call is None:
            return None
        try:
            return shown(evaluate(call))
        except BadExpression as error:
            return f"error: {error}" if self.wrong is None else self.wrong

    def call(self, text: str) -> str | None:
        """The expression of the last complete call."""
        end = text.rfind(self.close) if self.close else len(text)
        begin = text.rfind(self.open, 0, max(end, 0)) if self.open else 0
        return None if end < 0 or begin < 0 else text[begin + len(self.open) : end]


def evaluate(expression: str) -> Fraction:
    """The exact value. Raises `BadExpression`; never takes long, whatever the text."""
    if len(expression) > LONGEST:
        raise BadExpression(f"more than {LONGEST} characters")
    parser = _Parser(_tokens(expression))
    value = parser.sum()
    if parser.next is not None:
        raise BadExpression(f"unexpected {parser.next}")
    return value


def shown(value: Fraction) -> str:
    """A whole number as such; others rounded to 12 decimals, without zeros at the end."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(abs(value) * 10**_PLACES)
    whole, part = divmod(scaled, 10**_PLACES)
    digits = f"{part:0{_PLACES}d}".rstrip("0")
    sign = "-" if value < 0 and scaled else ""
    return sign + (f"{whole}.{digits}" if digits else str(whole))


def _tokens(expression: str) -> list[str]:
    found, at = [], 0
    text = expression.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise BadExpression(f"unexpected {text[at:].lstrip()[:1]}")
        found.append(match[1])
        at = match.end()
    return found


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]

    @property
    def next(self) -> str | None:
        return self._tokens[-1] if self._tokens else None

    def sum(self) -> Fraction:
        value = self._product()
        while self.next in ("+", "-"):
            sign = 1 if self._tokens.pop() == "+" else -1
            value = _bounded(value + sign * self._product())
        return value

    def _product(self) -> Fraction:
        value = self._sign()
        while self.next in ("*", "/"):
            if self._tokens.pop() == "*":
                value = _bounded(value * self._sign())
                continue
            divisor = self._sign()
            if not divisor:
                raise BadExpression("division by zero")
            value = _bounded(value / divisor)
        return value

    def _sign(self) -> Fraction:
        sign = 1
        while self.next in ("+", "-"):
            sign *= 1 if self._tokens.pop() == "+" else -1
        return sign * self._value()

    def _value(self) -> Fraction:
        if self.next is None:
            raise BadExpression("it ends too early")
        token = self._tokens.pop()
        if token == "(":
            value = self.sum()
            if self.next != ")":
                raise BadExpression("a bracket is not closed")
            self._tokens.pop()
            return value
        if not (token[0].isdigit() or token[0] == "."):
            raise BadExpression(f"unexpected {token}")
        return _bounded(Fraction(f"0{token}" if token[0] == "." else token.rstrip(".")))


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) > LARGEST or value.denominator > LARGEST:
        raise BadExpression("a number is too large")
    return value
