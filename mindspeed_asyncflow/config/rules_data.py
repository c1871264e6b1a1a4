"""Which settings of the data fit together and are enough for the run, as far as settings alone tell."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from mindspeed_asyncflow.config.intake import DataConfig, SourceConfig
from mindspeed_asyncflow.config.schema import Config

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]


def rules(c: Config) -> Iterator[Raw]:
    yield from _sources(c)
    yield from _files(c)
    yield from _encoding(c)
    yield from _amount(c)


def training_prompts(data: DataConfig) -> int | None:
    """At most so many prompts to train on; None where only the files tell."""
    made = _made(data, data.mix) if data.mix else data.size
    return None if made is None else made - (0 if data.validation else data.heldout)


def evaluation_prompts(data: DataConfig) -> int | None:
    """At most so many prompts to evaluate with; None where only the files tell."""
    return _made(data, data.validation) if data.validation else data.heldout


def _made(data: DataConfig, sources: list[SourceConfig]) -> int | None:
    if any(source.size is None and source.task.startswith("file:") for source in sources):
        return None
    return sum(source.size or data.size for source in sources)


def _sources(c: Config) -> Iterator[Raw]:
    d = c.data
    task = DataConfig.model_fields["task"].default
    if d.mix and (d.task != task or d.options or d.columns):
        given = [f"data.{name}" for name in ("task", "options", "columns") if getattr(d, name) not in (task, {})]
        yield (
            "error",
            ("data.mix", *given),
            f"the prompts come from data.mix, so {' and '.join(given)} would be ignored; make it a source of the mix",
        )


def _files(c: Config) -> Iterator[Raw]:
    d = c.data
    mixed = [("data.mix", source.task) for source in d.mix] or [("data.task", d.task)]
    for key, task in [*mixed, *(("data.validation", source.task) for source in d.validation)]:
        kind, _, place = task.partition(":")
        if kind == "file" and not (Path(place).exists() or glob.glob(place, recursive=True)):
            yield (
                "error",
                (key,),
                f"{place or '(no name)'}: no such file or folder, and no file fits it as a pattern; correct it",
            )


def _encoding(c: Config) -> Iterator[Raw]:
    d = c.data
    if d.system_prompt is not None and not d.chat:
        yield (
            "error",
            ("data.system_prompt", "data.chat"),
            "a system prompt is a message of the chat template; set data.chat to true, or put it into the prompts",
        )
    if d.chat_template is not None and not Path(d.chat_template).is_file():
        yield "error", ("data.chat_template",), f"there is no file {d.chat_template}; correct the path"
    if d.chat and d.too_long == "cut_right":
        yield (
            "warning",
            ("data.too_long", "data.chat"),
            "a cut on the right takes away the end of the chat template, which asks for the answer; cut_left keeps it",
        )


def _amount(c: Config) -> Iterator[Raw]:
    d, groups = c.data, c.workflow.groups_per_step
    training = training_prompts(d)
    if training is not None:
        yield from _enough(c, training, groups)
    asked = evaluation_prompts(d)
    if (training is None or training > 0) and asked is not None and c.evaluation.prompts > asked:
        source = "data.validation" if d.validation else "data.heldout"
        held = "in data.validation" if d.validation else "held out"
        yield (
            "warning",
            ("evaluation.prompts", source),
            f"only {asked} prompts are {held}, {c.evaluation.prompts} are asked; the {asked} are used",
        )


def _enough(c: Config, training: int, groups: int) -> Iterator[Raw]:
    d = c.data
    if training < 1:
        yield (
            "error",
            ("data.heldout", "data.size"),
            f"{d.heldout} held-out prompts of {training + d.heldout} leave none to train on; "
            "lower data.heldout, or raise data.size",
        )
        return
    per_epoch = training // groups if d.drop_last else -(-training // groups)
    if per_epoch == 0:
        yield (
            "error",
            ("data.size", "data.heldout", "workflow.groups_per_step", "data.drop_last"),
            f"{training} training prompts < {groups} groups per step, and drop_last leaves them out: no step at all; "
            "lower groups_per_step, or raise data.size",
        )
    elif per_epoch * d.epochs < c.trainer.steps:
        yield (
            "error",
            ("trainer.steps", "data.epochs", "data.size"),
            f"data ends after {per_epoch * d.epochs} steps ({training} training prompts, {d.epochs} epochs, "
            f"{groups} groups per step) but {c.trainer.steps} are asked; "
            f"raise data.epochs to {-(-c.trainer.steps // per_epoch)}",
        )
