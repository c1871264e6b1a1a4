"""Sums of one-digit numbers as bare expressions, for models with a character tokenizer."""

from __future__ import annotations

import random
import re

from mindspeed_asyncflow.data.gym import ReasoningGym
from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.errors import DataError

_NUMBER = re.compile(r"-?\d+")


class ChainSum:
    """`3+4-1=` -> `6`. Reward 1 for exactly the right number, ended by the policy itself; else 0.

    The problems are those of reasoning_gym's chain_sum with one-digit numbers, without its English sentence.
    """

    name = "chain_sum"

    def __init__(self, min_terms: int = 2, max_terms: int = 3) -> None:
        if not 2 <= min_terms <= max_terms:
            raise DataError(f"task chain_sum needs 2 <= min_terms <= max_terms, got {min_terms} and {max_terms}")
        self.terms = {"min_terms": min_terms, "max_terms": max_terms}

    def problems(self, size: int, seed: int) -> list[Problem]:
        items = ReasoningGym("chain_sum", **self.terms, min_digits=1, max_digits=1).items(size, seed)
        return [Problem(f"{_bare(item['metadata']['expression'])}=", str(item["answer"])) for item in items]

    def score(self, text: str, truth: str, finished: bool) -> float:
        return float(finished and _NUMBER.fullmatch(text) is not None and int(text) == int(truth))

    def demonstrate(self, problem: Problem, rng: random.Random) -> str:
        """The right answer one time in four, else that of a fluent mistake: the last number forgotten, every sign read
        as plus, or the first number copied."""
        numbers = signed_numbers(problem.text)
        if rng.randrange(4) == 0:
            return problem.truth
        return str(rng.choice((sum(numbers[:-1]), sum(map(abs, numbers)), numbers[0])))


def signed_numbers(expression: str) -> list[int]:
    """[3, 4, -1] of "3+4-1="."""
    return [int(sign + digits) for sign, digits in re.findall(r"(-?)(\d+)", expression)]


def _bare(expression: str) -> str:
    return expression.replace(" ", "")
