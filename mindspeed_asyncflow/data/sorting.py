"""Digit sorting: small enough to be learnt by a model with a character tokenizer in a minute on one core."""

from __future__ import annotations

import math
import random

from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.errors import DataError


def _sorted_problem(digits: str) -> Problem:
    return Problem(prompt=f"{digits}>", truth="".join(sorted(digits)))


def _mixed_demonstration(problem: Problem, rng: random.Random) -> str:
    """The right answer one time in four, else a fluent wrong one: descending, copied or reversed.

    A policy that is confident in each of several modes has something to choose from; one that is merely
    under-trained collapses under negative advantages.
    """
    if rng.randrange(4) == 0:
        return problem.truth
    digits = problem.text[:-1]
    return rng.choice((problem.truth[::-1], digits, digits[::-1]))


class SortDigits:
    """`7302>` -> `0237`. Reward 1 for exactly the sorted digits, ended by the policy itself; else 0."""

    name = "sort4"
    digits = 4

    def problems(self, size: int, seed: int) -> list[Problem]:
        count = 10**self.digits
        if size > count:
            raise DataError(f"task {self.name} has {count} prompts; data.size asks for {size}")
        chosen = random.Random(f"{self.name}:{seed}").sample(range(count), size)
        return [_sorted_problem(f"{number:0{self.digits}d}") for number in chosen]

    def score(self, text: str, truth: str, finished: bool) -> float:
        return float(finished and text == truth)

    def demonstrate(self, problem: Problem, rng: random.Random) -> str:
        return _mixed_demonstration(problem, rng)


class SortFive(SortDigits):
    """The same with five digits: `73021>` -> `01237`."""

    name = "sort5"
    digits = 5


class SortLong:
    """The same with lengths drawn log-uniformly, so that a few answers are many times longer than most.

    Reward: share of positions that are right, 0 for an answer that the policy did not end itself.
    """

    name = "sort_long"

    def __init__(self, min_digits: int = 4, max_digits: int = 250) -> None:
        if not 1 <= min_digits <= max_digits:
            raise DataError(f"task sort_long needs 1 <= min_digits <= max_digits, got {min_digits} and {max_digits}")
        self.min_digits, self.max_digits = min_digits, max_digits

    def problems(self, size: int, seed: int) -> list[Problem]:
        rng = random.Random(f"{self.name}:{seed}")
        low, high = math.log(self.min_digits), math.log(self.max_digits + 1)
        lengths = (min(self.max_digits, int(math.exp(rng.uniform(low, high)))) for _ in range(size))
        return [_sorted_problem("".join(rng.choices("0123456789", k=length))) for length in lengths]

    def score(self, text: str, truth: str, finished: bool) -> float:
        if not finished:
            return 0.0
        return sum(a == b for a, b in zip(text, truth)) / max(len(text), len(truth))

    def demonstrate(self, problem: Problem, rng: random.Random) -> str:
        return _mixed_demonstration(problem, rng)
