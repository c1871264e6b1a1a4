"""Settings of what goes in: prompts, environments, rewards and evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mindspeed_asyncflow.config.section import Section

Options = dict[str, str | int | float | bool | list | dict | None]


class SourceConfig(Section):
    """One of several sources of prompts."""

    task: str = Field(description="As data.task.")
    options: Options = Field(default_factory=dict, description="As data.options.")
    columns: dict[str, str] = Field(default_factory=dict, description="As data.columns.")
    size: int | None = Field(None, ge=1, description="Prompts to make or read; default: all of a file, data.size else.")
    weight: float = Field(1.0, gt=0, description="Share of an epoch's prompts, relative to the other sources.")


class DataConfig(Section):
    task: str = Field(
        "sort4",
        description="sort4, sort5, sort_long, chain_sum, reasoning_gym:DATASET, file:PATH (JSON lines, JSON, CSV or "
        "Parquet; a file, folder or pattern) or python:MODULE:CLASS.",
    )
    options: Options = Field(default_factory=dict, description="Arguments of the task (reasoning_gym dataset options).")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="file: tasks: names of the columns that hold prompt, answer, id and system, where they differ; "
        "fields: those that go along to scorers, default all.",
    )
    mix: list[SourceConfig] = Field(
        default_factory=list,
        description="Several sources in place of task, each with task, options, columns, size, weight.",
    )
    validation: list[SourceConfig] = Field(
        default_factory=list, description="Sources of evaluation prompts, in place of held-out ones."
    )
    size: int = Field(10000, ge=2, description="Prompts to make or read, held-out ones included.")
    heldout: int = Field(400, ge=0, description="Prompts kept apart for evaluation.")
    epochs: int = Field(1000, ge=1, description="Passes over the training prompts before the data ends.")
    drop_last: bool = Field(True, description="Leave out an incomplete last batch of an epoch.")
    max_prompt_tokens: int = Field(64, ge=1, description="Longest prompt; see too_long.")
    too_long: Literal["drop", "cut_left", "cut_right", "error"] = Field(
        "drop", description="Prompts above max_prompt_tokens are dropped and counted, cut on one side, or refused."
    )
    chat: bool = Field(False, description="Wrap prompts in the chat template.")
    system_prompt: str | None = Field(None, description="Put before every conversation that has none; needs chat.")
    chat_template: str | None = Field(None, description="File with a Jinja chat template, in place of the tokenizer's.")


class TurnsConfig(Section):
    environment: str | None = Field(
        None,
        description="Who answers the model in a row: calculator, reasoning_gym, or python:MODULE:CLASS; off if null.",
    )
    options: Options = Field(default_factory=dict, description="Arguments of the environment.")
    role: str = Field("user", description="Role of the replies in the chat template, e.g. user or tool.")
    reply_start: str = Field("\n", description="Put before a reply where data.chat is off.")
    reply_end: str = Field("\n", description="Put after a reply where data.chat is off.")
    max_turns: int = Field(4, ge=1, description="Most turns of the model in one answer.")
    timeout_s: float = Field(5.0, gt=0, description="Deadline of one reply of the environment.")
    workers: int = Field(1, ge=1, description="Environment processes of each replica.")


class ScorerConfig(Section):
    """One scorer of a weighted sum."""

    name: str = Field(description="exact, format, number, choice, math, code, length, http, or MODULE:FUNCTION.")
    weight: float = Field(1.0, description="Factor in the sum.")
    options: Options = Field(default_factory=dict, description="Arguments of the scorer.")


class RewardConfig(Section):
    scorers: list[ScorerConfig] = Field(
        default_factory=list,
        description="Weighted sum of scorers, each with name, weight and options; empty: the task's own scorer.",
    )
    workers: int = Field(1, ge=1, description="Scorer processes.")
    timeout_s: float = Field(5.0, gt=0, description="Deadline for scoring one answer.")
    on_timeout: Literal["zero", "drop"] = Field("drop", description="What a timed-out or failed score becomes.")
    overlong_buffer: int | None = Field(
        None,
        ge=1,
        description="Answers longer than rollout.max_new_tokens minus this are punished, linearly (DAPO); off if null.",
    )
    overlong_factor: float = Field(1.0, gt=0, description="Punishment at the end of the buffer.")
    overlong_beyond: Literal["capped", "falling"] = Field(
        "capped", description="Beyond the limit the punishment stays, or goes on falling."
    )


class EvaluationConfig(Section):
    every: int | None = Field(
        None, ge=1, description="Evaluate held-out prompts every N steps; always at start and end."
    )
    prompts: int = Field(400, ge=0, description="Held-out prompts used; 0: no evaluation.")
    answers: int = Field(1, ge=1, description="Answers per prompt (k of mean@k, pass@k and maj@k).")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluation; 0: greedy.")
    share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Part of a replica's running answers that an evaluation beside training uses (with max_lag).",
    )
