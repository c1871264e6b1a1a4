"""What a task is, and how its name in the settings becomes one.

Scorer processes import this module: it loads neither torch nor transformers nor the settings schema.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mindspeed_asyncflow.data.gym import ReasoningGym
from mindspeed_asyncflow.data.jsonl import JsonLines
from mindspeed_asyncflow.data.sorting import SortDigits, SortLong
from mindspeed_asyncflow.errors import DataError

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import DataConfig
    from mindspeed_asyncflow.data.problem import Problem


@runtime_checkable
class Task(Protocol):
    """Makes problems and scores answers. Must be able to live in a process of its own."""

    name: str

    def problems(self, size: int, seed: int) -> Sequence[Problem]:
        """At most `size` problems; the same for the same arguments."""
        ...

    def score(self, text: str, truth: str, finished: bool) -> float | None:
        """Reward of the answer `text`; `finished`: the policy ended it itself. None: this scorer abstains."""
        ...


@runtime_checkable
class Demonstrating(Protocol):
    """A task that can also show answers, good and bad ones: what a generated model is warmed up on."""

    def demonstrate(self, problem: Problem, rng: random.Random) -> str: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    make: Callable[..., Task]
    about: str


_BUILTIN: dict[str, _Entry] = {
    "sort4": _Entry(SortDigits, "sort four digits"),
    "sort_long": _Entry(SortLong, "sort 4 to 250 digits, few of them long"),
}
_PREFIXED: dict[str, _Entry] = {
    "reasoning_gym": _Entry(ReasoningGym, "reasoning_gym:DATASET"),
    "jsonl": _Entry(JsonLines, "jsonl:FILE with the fields prompt and answer"),
}


def build_task(name: str, options: dict[str, Any]) -> Task:
    """The task called `name`: a built-in one, `reasoning_gym:DATASET`, `jsonl:FILE` or `python:MODULE:CLASS`.

    Raises `DataError` for an unknown name, for options that the task does not have, and for missing libraries.
    """
    prefix, _, rest = name.partition(":")
    try:
        if name in _BUILTIN:
            return _BUILTIN[name].make(**options)
        if prefix in _PREFIXED and rest:
            return _PREFIXED[prefix].make(rest, **options)
        if prefix == "python" and rest.count(":") == 1:
            return _user_class(*rest.split(":"))(**options)
    except TypeError as error:
        raise DataError(f"data.options {options} do not fit task {name}: {error}") from error
    known = [*_BUILTIN, *(entry.about for entry in _PREFIXED.values()), "python:MODULE:CLASS"]
    raise DataError(f"data.task {name!r} is unknown; there are: {', '.join(known)}")


def make_task(data: DataConfig) -> Task:
    """The task that the settings name."""
    return build_task(data.task, dict(data.options))


def _user_class(module: str, attribute: str) -> Callable[..., Task]:
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DataError(f"data.task python:{module}:{attribute} cannot be loaded: {error}") from error
