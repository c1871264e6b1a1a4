"""What an environment is, and how its name in the settings becomes one.

Environment processes import this module: it loads neither torch nor transformers nor the settings schema.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from mindspeed_asyncflow.errors import RewardError

MODEL, REPLY = "assistant", "environment"  # roles of turns
EXAMPLE = """class Echo:
    def reply(self, turns, truth, fields): return turns[-1].text if len(turns) < 3 else None"""


class Turn(NamedTuple):
    """One turn after the prompt: of the model, or a reply to it."""

    role: str  # MODEL or REPLY
    text: str  # without the token that ended it


class Environment(Protocol):
    """Answers the model. Nothing is kept between calls: the turns are all there is, so a call can be repeated."""

    def reply(self, turns: Sequence[Turn], truth: str, fields: dict[str, Any]) -> str | None:
        """What the model reads next; None: the conversation is over.

        `turns`: all so far, the last one of the model. `truth` and `fields` (`prompt` and the data's other columns)
        are those of the row. Whatever is raised ends the conversation with what is there.
        """
        ...


def build_environment(name: str, options: dict[str, Any]) -> Environment:
    """`calculator`, `reasoning_gym` or `python:MODULE:CLASS`, made with `options`.

    Raises `RewardError` for an unknown name, options that do not fit, or a `reply` that cannot be called.
    """
    make = _maker(name)
    try:
        environment = make(**options)
    except TypeError as error:
        raise RewardError(f"turns.options {options} do not fit environment {name}: {error}") from error
    try:
        inspect.signature(environment.reply).bind([], "", {})
    except (AttributeError, TypeError) as error:
        raise RewardError(
            f"turns.environment {name} has no method reply(turns, truth, fields) ({error}); one that has it:\n{EXAMPLE}"
        ) from error
    return environment


def _maker(name: str) -> Callable[..., Environment]:
    if name == "calculator":
        from mindspeed_asyncflow.environments.calculator import Calculator

        return Calculator
    if name == "reasoning_gym":
        from mindspeed_asyncflow.environments.judge import ReasoningGymJudge

        return ReasoningGymJudge
    prefix, _, rest = name.partition(":")
    if prefix != "python" or rest.count(":") != 1:
        raise RewardError(
            f"turns.environment {name!r} is unknown; there are: calculator, reasoning_gym, python:MODULE:CLASS"
        )
    module, attribute = rest.split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"turns.environment {name} cannot be loaded: {error}; an example:\n{EXAMPLE}") from error
