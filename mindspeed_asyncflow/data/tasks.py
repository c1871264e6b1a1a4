"""What a task is, and how its name in the settings becomes one.

Scorer processes import this module: it loads neither torch nor transformers nor the settings schema.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mindspeed_asyncflow.data.files import Files
from mindspeed_asyncflow.data.gym import ReasoningGym
from mindspeed_asyncflow.data.sorting import SortDigits, SortFive, SortLong
from mindspeed_asyncflow.data.sums import ChainSum
from mindspeed_asyncflow.errors import DataError

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import DataConfig
    from mindspeed_asyncflow.data.problem import Problem


@runtime_checkable
class Task(Protocol):
    """Makes problems and scores answers. Must be able to live in a process of its own."""

    name: str

    def problems(self, size: int, seed: int) -> Sequence[Problem]:
        """At most `size` problems; the same for the same arguments. A task with a list `notes` says there what else
        there is to know about them."""
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
    "sort5": _Entry(SortFive, "sort five digits"),
    "sort_long": _Entry(SortLong, "sort 4 to 250 digits, few of them long"),
    "chain_sum": _Entry(ChainSum, "sums and differences of one-digit numbers"),
}
_PREFIXED: dict[str, _Entry] = {
    "reasoning_gym": _Entry(ReasoningGym, "reasoning_gym:DATASET"),
}


def build_task(name: str, options: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> Task:
    """The task called `name`: a built-in one, `file:PATH`, `reasoning_gym:DATASET` or `python:MODULE:CLASS`.

    Raises `DataError` for an unknown name, for options that the task does not have, and for missing libraries.
    """
    prefix, _, rest = name.partition(":")
    if columns and prefix != "file":
        raise DataError(f"data.columns {dict(columns)} is for file: tasks; {name} has no columns")
    try:
        if prefix == "file" and rest:
            return Files(rest, dict(columns or {}), **options)
        if name in _BUILTIN:
            return _BUILTIN[name].make(**options)
        if prefix in _PREFIXED and rest:
            return _PREFIXED[prefix].make(rest, **options)
        if prefix == "python" and rest.count(":") == 1:
            return _user_class(*rest.split(":"))(**options)
    except TypeError as error:
        raise DataError(f"data.options {dict(options)} do not fit task {name}: {error}") from error
    known = [*_BUILTIN, *(entry.about for entry in _PREFIXED.values()), "file:PATH", "python:MODULE:CLASS"]
    raise DataError(f"data.task {name!r} is unknown; there are: {', '.join(known)}")


def named_tasks(data: DataConfig) -> list[tuple[str, dict[str, Any]]]:
    """Name and options of every source, training ones first: `source` in the fields of a prompt counts these."""
    train = [(s.task, dict(s.options)) for s in data.mix] or [(data.task, dict(data.options))]
    return train + [(s.task, dict(s.options)) for s in data.validation]


def _user_class(module: str, attribute: str) -> Callable[..., Task]:
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"data.task python:{module}:{attribute} cannot be loaded ({error}): its class has name, problems and score "
            "(docs/data.md), its folder is in PYTHONPATH"
        ) from error
