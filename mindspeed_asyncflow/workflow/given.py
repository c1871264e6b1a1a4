"""Answers that came about outside the run, for instance those of an agent: they are scored and trained as others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.records import Completion, VersionSpan


@dataclass(frozen=True, slots=True)
class Given:
    """All answers to one prompt, in the order of their members."""

    answers: tuple[Completion, ...]
    rewards: np.ndarray | None = None  # float64 [group_size], NaN: none; None: the run's scorers find them
    advantages: np.ndarray | None = None  # float32 [group_size]; None: from the rewards

    @property
    def oldest(self) -> int:
        """Policy version of the oldest token."""
        return min(answer.version_min for answer in self.answers)


def as_plain(given: Given) -> dict[str, Any]:
    """As JSON values."""
    answers = [
        {
            "ids": answer.token_ids.tolist(),
            "logprobs": [float(value) for value in answer.logprobs],
            "finish": answer.finish_reason,
            "spans": [[span.version, span.start, span.end] for span in answer.spans],
            "mask": None if answer.mask is None else answer.mask.tolist(),
        }
        for answer in given.answers
    ]
    numbers = {name: getattr(given, name) for name in ("rewards", "advantages")}
    return {"answers": answers} | {n: None if v is None else [float(x) for x in v] for n, v in numbers.items()}


def answers_of(plain: Mapping[str, Any]) -> Given:
    """What `as_plain` was given."""
    answers = tuple(
        Completion(
            "",
            np.array(each["ids"], np.int32),
            np.array(each["logprobs"], np.float32),
            each["finish"],
            tuple(VersionSpan(*span) for span in each["spans"]),
            mask=None if each["mask"] is None else np.array(each["mask"], np.uint8),
        )
        for each in plain["answers"]
    )
    rewards, advantages = plain["rewards"], plain["advantages"]
    return Given(
        answers,
        None if rewards is None else np.array(rewards, np.float64),
        None if advantages is None else np.array(advantages, np.float32),
    )
