"""Where the prompts of a run come from: one source or a weighted mix, and maybe others for evaluation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.data.tasks import Task, build_task

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.intake import DataConfig, SourceConfig


@dataclass(frozen=True, slots=True)
class Source:
    """A task, how many problems of it at most, and its weight in an epoch."""

    task: Task
    size: int
    weight: float = 1.0

    def problems(self, seed: int) -> list[Problem]:
        return list(self.task.problems(self.size, seed))

    @property
    def notes(self) -> list[str]:
        """What the task has to say about the problems that it just made or read."""
        return list(getattr(self.task, "notes", ()))


@dataclass(frozen=True, slots=True)
class Sources:
    train: Sequence[Source]
    validation: Sequence[Source] = field(default_factory=tuple)


def make_sources(data: DataConfig) -> Sources:
    """The sources that the settings name. Raises `DataError` for what `build_task` refuses."""
    if data.mix:
        train = [_source(source, data.size) for source in data.mix]
    else:
        train = [Source(build_task(data.task, dict(data.options), data.columns), data.size)]
    return Sources(train, [_source(source, data.size) for source in data.validation])


def _source(source: SourceConfig, default: int) -> Source:
    size = source.size or (sys.maxsize if source.task.startswith("file:") else default)
    return Source(build_task(source.task, dict(source.options), source.columns), size, source.weight)
