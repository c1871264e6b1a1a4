"""From the names in the settings to scorers. Imported by scorer processes: nothing heavy at the top."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, get_type_hints

from mindspeed_asyncflow.data.tasks import Task, build_task, named_tasks
from mindspeed_asyncflow.errors import RewardError
from mindspeed_asyncflow.rewards.base import Answer, BatchScorer, Scorer
from mindspeed_asyncflow.rewards.code import Code
from mindspeed_asyncflow.rewards.combined import Combined, Part
from mindspeed_asyncflow.rewards.http import Http
from mindspeed_asyncflow.rewards.mathematics import Math
from mindspeed_asyncflow.rewards.texts import Choice, Exact, Format, Length, Number

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import DataConfig, RewardConfig

SCORERS: dict[str, Callable[..., Scorer | BatchScorer]] = {
    "exact": Exact,
    "format": Format,
    "number": Number,
    "choice": Choice,
    "math": Math,
    "code": Code,
    "length": Length,
    "http": Http,
}
ARGUMENTS = ("answer", "truth", "prompt", "fields", "finished", "tokens")  # of a user's function
EXAMPLE = "def score(answer: str, truth: str) -> float | None:\n    return float(answer.strip() == truth)"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a scorer process is told: plain values."""

    tasks: list[tuple[str, dict[str, Any]]]  # name and options of each source of prompts
    scorers: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)  # name, weight, options
    timeout_s: float = 5.0

    @classmethod
    def of(cls, data: DataConfig, reward: RewardConfig) -> Spec:
        scorers = [(s.name, s.weight, dict(s.options)) for s in reward.scorers]
        return cls(named_tasks(data), scorers, reward.timeout_s)

    @property
    def in_batches(self) -> bool:
        return any(hasattr(SCORERS.get(name), "score_batch") for name, *_ in self.scorers)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class TaskScorer:
    """The scorer that comes with the task of each prompt's source."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks

    def score(self, answer: Answer) -> float | None:
        source = int(answer.fields.get("source", 0)) if len(self.tasks) > 1 else 0
        return self.tasks[source].score(answer.text, answer.truth, answer.finished)


class UserFunction:
    """A function of the user's, called with those of `ARGUMENTS` that it names."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        module, _, attribute = name.partition(":")
        try:
            self.function = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # boundary: a module of the user's may do anything while it is imported
            said = f"{type(error).__name__}: {error}"
            raise RewardError(f"reward.scorers {name!r} cannot be loaded: {said}. For example\n{EXAMPLE}") from error
        if inspect.iscoroutinefunction(self.function):
            raise RewardError(f"reward.scorers {name!r} is async, a scorer must not be. For example\n{EXAMPLE}")
        if both := sorted(set(options) & set(ARGUMENTS)):
            said = f"options {', '.join(both)} are what every scorer is given"
            raise RewardError(f"reward.scorers {name!r}: {said}. For example\n{EXAMPLE}")
        self.options = dict(options)
        self.names = self._names(name)

    def _names(self, name: str) -> list[str]:
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError) as error:
            raise RewardError(f"reward.scorers {name!r} is no function: {error}. For example\n{EXAMPLE}") from error
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [p.name for p in parameters if p.kind in by_name]
        wild = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY]
        strange = [p.name for p in parameters if p.default is p.empty and p.kind in by_name]
        strange = [n for n in strange if n not in ARGUMENTS and n not in self.options] + positional
        unknown = [] if wild else [n for n in self.options if n not in named]
        if strange or unknown or not (wild or any(n in ARGUMENTS for n in named)):
            wrong = f"wants {', '.join(strange)}" if strange else f"has no argument {', '.join(unknown) or 'at all'}"
            raise RewardError(
                f"reward.scorers {name!r} {wrong}; a scorer may name {', '.join(ARGUMENTS)} and its options. "
                f"For example\n{EXAMPLE}"
            )
        return list(ARGUMENTS) if wild else [n for n in named if n in ARGUMENTS]

    def score(self, answer: Answer) -> float | None:
        known = {
            "answer": answer.text,
            "truth": answer.truth,
            "prompt": answer.prompt,
            "fields": answer.fields,
            "finished": answer.finished,
            "tokens": answer.tokens,
        }
        return self.function(**{name: known[name] for name in self.names}, **self.options)


def build_scorer(name: str, options: Mapping[str, Any], timeout_s: float) -> Scorer | BatchScorer:
    """The scorer called `name`. Raises `RewardError` for an unknown name and for wrong or missing options."""
    if ":" in name:
        return UserFunction(name, options)
    if name not in SCORERS:
        raise RewardError(f"reward.scorers {name!r} is unknown; there are: task, {', '.join(SCORERS)}, MODULE:FUNCTION")
    takes = inspect.signature(SCORERS[name]).parameters
    given = ({"timeout_s": timeout_s} if "timeout_s" in takes else {}) | dict(options)
    if missing := [option for option, p in takes.items() if p.default is p.empty and option not in given]:
        said = f"option {missing[0]} is" if len(missing) == 1 else f"options {', '.join(missing)} are"
        raise RewardError(f"reward.scorers {name}: {said} missing")
    try:
        return SCORERS[name](**given)
    except (TypeError, ValueError, OSError) as error:
        raise RewardError(f"reward.scorers {name} with options {dict(options)}: {error}") from error


def _check_kinds(name: str, options: Mapping[str, Any]) -> None:
    """Raises `RewardError` for an option whose value is not of the kind that the scorer declares."""
    from pydantic import TypeAdapter, ValidationError  # scorer processes, which are told what is right, do without

    kinds = get_type_hints(SCORERS[name].__init__)
    for option, value in options.items():
        try:
            TypeAdapter(kinds.get(option, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            wrong = error.errors()[0]["msg"].lower()
            raise RewardError(f"reward.scorers {name}, option {option} = {value!r}: {wrong}") from error


def check(spec: Spec) -> None:
    """Raises `RewardError` for scorers that cannot be made, or cannot work on this machine."""
    for name, _, options in spec.scorers:
        if name in SCORERS:
            _check_kinds(name, options)
    for part in build(spec).parts:
        if isinstance(part.scorer, Code):
            part.scorer.check()


def build(spec: Spec) -> Combined:
    """All scorers of a run. Raises `RewardError` or `DataError` for what cannot be built."""
    if not spec.scorers:
        return Combined([Part("task", 1.0, TaskScorer([build_task(*task) for task in spec.tasks]))])
    parts: list[Part] = []
    for name, weight, options in spec.scorers:
        same = sum(part.name.split("#")[0] == name for part in parts)
        label = f"{name}#{same + 1}" if same else name
        if name == "task":
            scorer: Scorer | BatchScorer = TaskScorer([build_task(*task) for task in spec.tasks])
        else:
            scorer = build_scorer(name, options, spec.timeout_s)
        parts.append(Part(label, weight, scorer))
    if not any(part.weight for part in parts):
        raise RewardError("all weights of reward.scorers are 0")
    return Combined(parts, spec.timeout_s)
