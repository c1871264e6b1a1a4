"""Which settings fit together with an environment that answers the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mindspeed_asyncflow.config.schema import Config

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]


def rules(c: Config) -> Iterator[Raw]:
    if c.turns.environment is None:
        return
    w = c.workflow
    interrupting = {"partial_rounds": w.partial_rounds, "lend": w.lend, "repack_below": w.repack_below}
    for key, used in interrupting.items():
        if used:
            yield (
                "error",
                (f"workflow.{key}", "turns.environment"),
                f"{key} interrupts answers and goes on with them later, and a conversation that is interrupted starts "
                "again; leave it out where an environment answers the model",
            )
    if c.turns.max_turns == 1:
        yield (
            "warning",
            ("turns.max_turns", "turns.environment"),
            "with one turn the environment is never asked; set max_turns to 2 or more",
        )
    if c.turns.timeout_s * max(1, c.turns.max_turns - 1) >= c.rollout.timeout_s:
        yield (
            "warning",
            ("turns.timeout_s", "turns.max_turns", "rollout.timeout_s"),
            f"{c.turns.max_turns - 1} replies of {c.turns.timeout_s:g} s each may take longer than rollout.timeout_s "
            f"({c.rollout.timeout_s:g} s), which ends the run; raise it",
        )
