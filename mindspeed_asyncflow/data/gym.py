"""Procedural tasks of the optional `reasoning-gym` library."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from types import ModuleType
from typing import Any

from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.errors import DataError

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class ReasoningGym:
    """Questions and scores of one reasoning-gym dataset; `options` are the dataset's own.

    Scores are the dataset's and not 0/1 everywhere: some give 0.01 for a well-formed wrong answer.
    """

    def __init__(self, dataset: str, **options: Any) -> None:
        self.name = f"reasoning_gym:{dataset}"
        self.dataset, self.options = dataset, options
        self._library = _load_library()
        self._made: Any = None

    def problems(self, size: int, seed: int) -> list[Problem]:
        return [Problem(item["question"], json.dumps(item, default=str)) for item in self.items(size, seed)]

    def items(self, size: int, seed: int) -> list[dict[str, Any]]:
        """The library's own records: question, answer and metadata."""
        return list(self._create(size=size, seed=seed))

    def score(self, text: str, truth: str, finished: bool) -> float:
        """The dataset's own score of the answer in `text`; unfinished answers get 0.

        The answer is what stands inside <answer> tags; without them, where the right answer is a number, the last
        number of the text ("7 + 5 = 12." answers 12), else the whole text.
        """
        if not finished:
            return 0.0
        if self._made is None:
            self._made = self._create(size=1, seed=0)
        item = json.loads(truth)
        answer = (self._library.utils.extract_answer(text) or text).strip()
        if "<answer>" not in text and _NUMBER.fullmatch(str(item["answer"])):
            numbers = _NUMBER.findall(answer)
            answer = numbers[-1] if numbers else answer
        return float(self._made.score_answer(answer, item))

    def _create(self, size: int, seed: int) -> Any:
        try:
            return self._library.create_dataset(self.dataset, size=size, seed=seed, **self.options)
        except (ValueError, AssertionError, TypeError) as error:
            raise DataError(f"reasoning_gym refuses dataset {self.dataset!r} with {self.options}: {error}") from error


def _load_library() -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of libraries that it loads, when they are compiled
            library = importlib.import_module("reasoning_gym")
            importlib.import_module("reasoning_gym.utils")
    except ImportError as error:
        raise DataError(
            f"a reasoning_gym task needs a library that is missing ({error}): pip install 'mindspeed_asyncflow[tasks]'"
        ) from error
    return library
