"""Functions as users write them."""

from __future__ import annotations


def good(answer: str, truth: str) -> float:
    return float(answer == truth)


def wide(answer, *, prompt, fields, bonus=0.0):
    return len(prompt) + len(fields) + bonus


def strange(answer, weather):
    return 1.0


def empty():
    return 1.0


NOT_A_FUNCTION = 3


async def later(answer):
    return 1.0
