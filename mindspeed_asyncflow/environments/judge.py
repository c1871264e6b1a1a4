"""A judge that lets the model try again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_asyncflow.data.gym import ReasoningGym
from mindspeed_asyncflow.environments.base import Turn


class ReasoningGymJudge:
    """Scores each turn as the reasoning-gym dataset does, and gives the hint while the score is below `enough`.

    The reply never holds anything of the right answer. `options` are the dataset's own.
    """

    def __init__(
        self, dataset: str, hint: str = "That is not right. Try again.", enough: float = 1.0, **options: Any
    ) -> None:
        self.hint, self.enough = hint, enough
        self.gym = ReasoningGym(dataset, **options)

    def reply(self, turns: Sequence[Turn], truth: str, fields: dict[str, Any]) -> str | None:
        return None if self.gym.score(turns[-1].text, truth, True) >= self.enough else self.hint
