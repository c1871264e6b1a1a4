"""Which settings fit together with a critic, and where a run that has one is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]


def rules(c: Config) -> Iterator[Raw]:
    k, t, w = c.critic, c.trainer, c.workflow
    if not c.algorithm.with_critic:
        return
    for key, used in (("lend", w.lend), ("schedule", w.schedule == "colocated")):
        if used:
            yield (
                "error",
                (f"workflow.{key}", "algorithm.advantage"),
                "devices that trainer and replicas share are given away between two steps, and a critic works then; "
                "gae needs schedule separated without lend",
            )
    if k.warmup_steps >= t.steps:
        yield (
            "error",
            ("critic.warmup_steps", "trainer.steps"),
            f"the policy would learn from step {k.warmup_steps} on, and only {t.steps} are run; lower it",
        )
    if k.lr_warmup_steps >= t.steps:
        yield (
            "warning",
            ("critic.lr_warmup_steps", "trainer.steps"),
            f"the rate rises over {k.lr_warmup_steps} steps and only {t.steps} are run: it never reaches critic.lr; "
            "lower it",
        )


def refuse_priced(c: Config) -> None:
    """Raise ConfigError where costs are wanted that are not known."""
    if c.algorithm.with_critic:
        raise ConfigError(
            "algorithm.advantage: gae trains a critic, of which neither plans nor simulations know the cost; plan and "
            "simulate with algorithm.advantage=grpo, and give the critic as many devices as the trainer beside them"
        )
