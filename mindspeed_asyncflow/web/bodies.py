"""What bodies of calls may say: one model per call, strict, and every unknown field is refused by its name.

From a model to the records of service/verbs.py by `made()`, and the description of each field on the OpenAPI page.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from mindspeed_asyncflow.service.verbs import Prompt, Trajectory, TrajectoryGroup
from mindspeed_asyncflow.web.arrays import floats, integers, tokens, values_of_rows

LONGEST_WAIT_S = 3600.0
MOST_ROWS = 65536  # of prompts, groups or columns in one call
_MOST = 2**63 - 1


class Body(BaseModel):
    """Nothing is converted that is of another type, and nothing is let pass that is not known."""

    model_config = ConfigDict(
        extra="forbid", strict=True, arbitrary_types_allowed=True, frozen=True, allow_inf_nan=False
    )


def _schema(description: str, *kinds: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(kinds), "description": description})


_NUMBERS = {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "null"}]}}
_INTEGERS = {"type": "array", "items": {"type": "integer", "minimum": -_MOST - 1, "maximum": _MOST}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_NESTED = {"type": "array", "items": _NUMBERS}

Integers = Annotated[np.ndarray, PlainValidator(integers), _schema("whole numbers", _INTEGERS)]
Floats = Annotated[np.ndarray, PlainValidator(floats), _schema("numbers, null for NaN", _NUMBERS)]
Values = Annotated[
    Any,
    PlainValidator(values_of_rows),
    _schema("one value per row: numbers, lists of numbers of any lengths, or texts", _NUMBERS, _NESTED, _TEXTS),
]
Tokens = Annotated[np.ndarray, PlainValidator(tokens), _schema("token ids", _INTEGERS)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Wait = Annotated[float, Field(ge=0, le=LONGEST_WAIT_S, description="longest time until the answer, in seconds")]


def _only_json(value: Any) -> Any:
    """Tensors can be put anywhere in a document; here they, and numbers without end, have no meaning."""
    try:
        json.dumps(value, allow_nan=False)
    except TypeError:
        raise ValueError("no tensor can be here") from None
    return value


def _prompt(value: Any) -> str | list[dict[str, Any]] | np.ndarray:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        for message in value:
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError("a chat message has a `role` and a `content`")
        return _only_json(value)
    if isinstance(value, np.ndarray) or (isinstance(value, list) and value):
        return tokens(value)
    raise ValueError("a prompt is a text, a list of chat messages, or a list of token ids")


_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": {}},
    "required": ["role", "content"],
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1}


class PromptBody(Body):
    """One prompt, to be answered `algorithm.group_size` times."""

    prompt: Annotated[
        Any,
        PlainValidator(_prompt),
        _schema("a text, chat messages, or token ids", {"type": "string"}, _MESSAGES, _INTEGERS | {"minItems": 1}),
    ]
    truth: str = Field("", description="what scorers compare answers with")
    fields: Annotated[dict[str, Any], AfterValidator(_only_json)] = Field(
        {}, description="JSON values, for scorers and environments"
    )

    def made(self) -> Prompt:
        return Prompt(self.prompt, self.truth, self.fields)


class InitEngines(Body):
    """Start the run of the server's settings."""

    overrides: dict[Annotated[str, Field(max_length=200)], str | int | float | bool | None] = Field(
        {}, description='settings put over the server\'s, {"trainer.steps": 20}; only harmless keys can be'
    )
    timeout_s: Wait = LONGEST_WAIT_S


class PutPrompts(Body):
    """Prompts, which are answered in this order."""

    prompts: list[PromptBody] = Field(max_length=MOST_ROWS)
    last: bool = Field(False, description="no more will come: the run ends when these are trained")


class GetExperience(Body):
    """Claim whole groups that wait for a task."""

    task: Name = Field("reward", description="of the run: reward; of rows of one's own: every task")
    columns: list[Name] = Field(max_length=64, description="columns of the rows to be read")
    groups: int = Field(1, ge=1, le=MOST_ROWS, description="most groups in the answer")
    timeout_s: Wait = 60.0


class PutExperience(Body):
    """Columns of claimed rows; they end the claim."""

    claim: int = Field(ge=0, le=_MOST)
    rows: Integers = Field(description="ids of all rows of the claim")
    columns: dict[Name, Values] = Field(max_length=64, description="for `reward`: rewards, and advantages if wished")


class TrajectoryBody(Body):
    """One answer that somebody else got."""

    response_ids: Tokens
    rollout_logprobs: Floats = Field(description="of every token, by the distribution that it was sampled from")
    version: int = Field(ge=0, le=_MOST, description="oldest policy version that sampled one of its tokens")
    response_mask: Tokens | None = Field(None, description="0 where the policy did not write the token, else 1")
    finished: bool = Field(True, description="it ended by itself, not by a limit")

    @model_validator(mode="after")
    def _fits(self) -> TrajectoryBody:
        for name in ("rollout_logprobs", "response_mask"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.response_ids):
                raise ValueError(f"{name} has {len(values)} values, response_ids has {len(self.response_ids)}")
        mask = self.response_mask
        if mask is not None and mask.size and mask.max() > 1:
            raise ValueError("response_mask has values other than 0 and 1")
        return self

    def made(self) -> Trajectory:
        mask = None if self.response_mask is None else self.response_mask.astype(np.uint8)
        logprobs = self.rollout_logprobs.astype(np.float32)
        return Trajectory(self.response_ids, logprobs, self.version, mask, self.finished)


class TrajectoryGroupBody(Body):
    """All answers to one prompt."""

    prompt: PromptBody
    answers: list[TrajectoryBody] = Field(min_length=1, max_length=MOST_ROWS, description="algorithm.group_size many")
    rewards: Floats | None = Field(None, description="one per answer; left out: the run's scorer finds them")
    advantages: Floats | None = Field(None, description="one per answer; left out: from the rewards")

    @model_validator(mode="after")
    def _fits(self) -> TrajectoryGroupBody:
        for name in ("rewards", "advantages"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.answers):
                raise ValueError(f"{name} has {len(values)} values for {len(self.answers)} answers")
        return self

    def made(self) -> TrajectoryGroup:
        rewards, advantages = (
            None if values is None else values.astype(np.float32) for values in (self.rewards, self.advantages)
        )
        return TrajectoryGroup(self.prompt.made(), [a.made() for a in self.answers], rewards, advantages)


class PutTrajectories(Body):
    """Groups of answers that came about outside; they are trained in the place of prompts."""

    groups: list[TrajectoryGroupBody] = Field(max_length=MOST_ROWS)


class Notify(Body):
    """Wait until every replica serves a version."""

    version: int | None = Field(None, ge=0, le=_MOST, description="left out: the newest that training has made")
    timeout_s: Wait = 600.0


class Waiting(Body):
    """A call without anything to say but how long it may take."""

    timeout_s: Wait = LONGEST_WAIT_S


class Stop(Body):
    """End the run."""

    now: bool = Field(False, description="at once; else what is issued is trained before")
    timeout_s: Wait = LONGEST_WAIT_S
