"""From the name of a user's engine to its class, and what the class lacks to be one."""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from mindspeed_asyncflow.config.engines import ROLLOUT_ENGINES, TRAIN_ENGINES
from mindspeed_asyncflow.config.feasibility import sharing_replicas
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.engines.base import RolloutEngine, SharingTrainEngine, TrainEngine
from mindspeed_asyncflow.engines.setup import RolloutSetup, TrainSetup
from mindspeed_asyncflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Side:
    """Where engines of one kind are named."""

    name: str  # section of the settings
    group: str  # of entry points
    known: tuple[str, ...]  # engines of the project

    @property
    def key(self) -> str:
        return f"{self.name}.engine"

    @property
    def example(self) -> str:
        kind = "Train" if self.name == "trainer" else "Rollout"
        return (
            f"  my_engines.py:  class {kind}: def __init__(self, setup, **engine_options): ...  "
            f"# a {kind}Engine of mindspeed_asyncflow/engines/base.py\n"
            f"  settings:       {self.name}: {{engine: my_engines:{kind}}}"
        )


TRAINER = Side("trainer", "mindspeed_asyncflow.train_engines", TRAIN_ENGINES)
ROLLOUT = Side("rollout", "mindspeed_asyncflow.rollout_engines", ROLLOUT_ENGINES)


def check(side: Side, config: Config) -> None:
    """Raise `ConfigError` unless the engine that `config` names can be imported and has all that a run calls.

    A class may have a static method `check(config)`, which raises `ConfigError` for settings that it cannot follow.
    """
    section = config.trainer if side is TRAINER else config.rollout
    found = find_class(side, section.engine)
    lacks = list(_lacks(side, found, section.engine_options, shares=bool(sharing_replicas(config))))
    if lacks:
        lines = "\n  ".join([f"{side.key}: {section.engine} is no engine:", *lacks])
        raise ConfigError(f"{lines}\nAn engine looks like this:\n{side.example}")
    if callable(own := getattr(found, "check", None)):
        own(config)


def find_class(side: Side, name: str) -> type:
    """The class called `name`: MODULE:CLASS, or an entry point. Raises `ConfigError` where there is none."""
    points = {point.name: point for point in entry_points(group=side.group)}
    if ":" in name:
        point = EntryPoint(name, name, side.group)
    elif name in points:
        point = points[name]
    else:
        known = [*side.known, *sorted(points)]
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{side.key}: {name} is unknown; there are {', '.join(known)}, MODULE:CLASS, and entry points of the group "
            f"{side.group}{meant} An engine of your own looks like this:\n{side.example}"
        )
    module, _, attribute = point.value.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # boundary: whatever the user's module raises while it is imported
        raise ConfigError(
            f"{side.key}: {point.value} cannot be imported ({type(error).__name__}: {error}); it must be importable "
            f"where the run is started, and on every node. An engine looks like this:\n{side.example}"
        ) from error
    if not inspect.isclass(found):
        raise ConfigError(f"{side.key}: {point.value} is no class but {found!r}. It looks like this:\n{side.example}")
    return found


def build_trainer(setup: TrainSetup) -> TrainEngine:
    """The user's training engine for one rank."""
    return cast(TrainEngine, _build(TRAINER, setup.trainer.engine, setup.trainer.engine_options, setup))


def build_rollout(setup: RolloutSetup) -> RolloutEngine:
    """The user's rollout engine for one replica. Raises `ConfigError` for one that cannot sleep where it must."""
    engine = cast(RolloutEngine, _build(ROLLOUT, setup.rollout.engine, setup.rollout.engine_options, setup))
    if setup.sleeps and 2 not in (levels := engine.capabilities().sleep_levels):
        engine.close()
        raise ConfigError(
            f"workflow.schedule: replicas on the trainers' devices sleep at level 2, and {setup.rollout.engine} has "
            f"{levels or 'no level'}: take separated without workflow.lend, or another rollout.engine"
        )
    return engine


def _build(side: Side, name: str, options: Mapping[str, Any], setup: Any) -> Any:
    found = find_class(side, name)
    engine = found(setup, **options)
    missing = [wanted for wanted in _members(_protocol(side, False)) if not hasattr(engine, wanted)]
    if missing:
        raise ConfigError(f"{side.key}: {name} has no {', '.join(missing)} when it is made")
    return engine


def _protocol(side: Side, shares: bool) -> type:
    if side is ROLLOUT:
        return RolloutEngine
    return SharingTrainEngine if shares else TrainEngine


def _members(protocol: type) -> dict[str, Any]:
    """Public methods and properties of a protocol, in order, those of its bases first."""
    classes = [c for c in reversed(protocol.__mro__) if getattr(c, "_is_protocol", False)]
    pairs = itertools.chain.from_iterable(vars(c).items() for c in classes)
    return {name: member for name, member in pairs if not name.startswith("_")}


def _lacks(side: Side, found: type, options: Mapping[str, Any], *, shares: bool) -> Iterator[str]:
    """What `found` lacks, a line for each."""
    try:
        inspect.signature(found).bind(None, **options)
    except TypeError as error:
        yield f"it cannot be made with (setup{''.join(f', {name}=...' for name in options)}): {error}"
    for name, wanted in _members(_protocol(side, shares)).items():
        given = getattr(found, name, None)
        if given is wanted:  # inherited from the protocol, which does nothing
            given = None
        if not inspect.isfunction(wanted):  # a property: an attribute of any kind will do
            if given is None and name not in _set_in(found):
                yield f"no {name} (a property, or set in __init__)"
        elif not callable(given):
            yield f"no {name}{_parameters(wanted)}"
        elif wrong := _misfit(wanted, given, bound=not inspect.isfunction(inspect.getattr_static(found, name))):
            yield f"{name}{_parameters(given)} does not fit {name}{_parameters(wanted)}: {wrong}"


def _set_in(found: type) -> set[str]:
    """Names that the class annotates, or that its `__init__`s speak of."""
    named: set[str] = set()
    for base in found.__mro__[:-1]:
        if getattr(base, "_is_protocol", False):
            continue
        code = getattr(base.__dict__.get("__init__"), "__code__", None)
        named |= {*inspect.get_annotations(base), *(code.co_names if code is not None else ())}
    return named


def _parameters(method: Any) -> str:
    """`(requests, timeout_s, stream=None)`"""
    try:
        given = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return "(...)"
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in given if p.name != "self"]
    return str(inspect.Signature(plain))


def _misfit(wanted: Any, given: Any, bound: bool) -> str:
    """Why `given` cannot be called as `wanted` is: parameters without a default by place, all of them by name.

    `bound`: it takes no self (static and class methods)."""
    if inspect.iscoroutinefunction(given) or inspect.isasyncgenfunction(given):
        return "engines are called from threads, so it must not be async"
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    own = [] if bound else [None]
    try:
        signature = inspect.signature(given)
        signature.bind(*own, *[None] * len(required))
        signature.bind(*own, **{p.name: None for p in parameters})
    except TypeError as error:
        return str(error)
    except ValueError:  # written in C: it cannot be looked at
        return ""
    return ""
