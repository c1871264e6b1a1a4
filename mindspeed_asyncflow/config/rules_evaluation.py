"""Which settings of evaluation measure something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mindspeed_asyncflow.config.schema import Config

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]


def rules(c: Config) -> Iterator[Raw]:
    e = c.evaluation
    if e.answers > 1 and e.temperature == 0:
        yield (
            "warning",
            ("evaluation.answers", "evaluation.temperature"),
            f"{e.answers} greedy answers to a prompt are all the same; set temperature, e.g. to 1, or answers to 1",
        )
    if e.every and not (e.prompts and (c.data.heldout or c.data.validation)):
        yield (
            "error",
            ("evaluation.every", "evaluation.prompts", "data.heldout", "data.validation"),
            f"an evaluation every {e.every} steps has no prompts; hold some out, name validation sources, or leave "
            "evaluation.every out",
        )
