"""Bodies of /v1/completions and /v1/chat/completions: OpenAI's fields, and a few of our own.

A field of OpenAI's that nothing here does is taken where it asks for nothing, and refused by its name elsewhere; fields
that only say who asks are passed over.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from mindspeed_asyncflow.service.verbs import CompletionRequest
from mindspeed_asyncflow.web.bodies import LONGEST_WAIT_S, Body

MOST_ANSWERS = 256  # of one call
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "prediction": (),
    "audio": (),
}
_WHO_ASKS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity")

Id = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Body):
    """What a stream has at its end."""

    include_usage: bool = Field(False, description="a last chunk with the numbers of tokens")
    include_obfuscation: bool = Field(False, description="is passed over")


class Sampled(Body):
    """What both calls have in common. What is left out is as the run's own answers are sampled."""

    model: str | None = Field(None, max_length=256, description="name from /v1/models; left out: the only one")
    n: int = Field(1, ge=1, le=MOST_ANSWERS, description="answers to each prompt")
    temperature: float | None = Field(None, ge=0, le=100, description="0: always the likeliest token")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="-1: off")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="the same weights then give the same answers")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, description="texts at which an answer ends, before them"
    )
    stop_token_ids: list[Id] = Field([], max_length=64, description="ids that end an answer, besides the model's own")
    stream: bool = Field(False, description="server-sent events, at last `[DONE]`")
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="`prompt_token_ids`, and `token_ids` of every answer")
    timeout_s: float = Field(600.0, gt=0, le=LONGEST_WAIT_S, description="longest time until all answers have ended")

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, nothing in _ASKS_FOR_NOTHING.items():
            value = data.get(name)
            if value is not None and not any((type(value) is not bool and value == n) or value is n for n in nothing):
                raise ValueError(f"{name} is not done here: leave it out")
        passed_over = {*_ASKS_FOR_NOTHING, *_WHO_ASKS}
        return {name: value for name, value in data.items() if name not in passed_over}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most_tokens(self) -> int | None:
        raise NotImplementedError

    def request(self, prompt_ids: np.ndarray, number: int) -> CompletionRequest:
        """Of answer `number` of the call; of one seed every answer has its own."""
        seed = None if self.seed is None else (self.seed + number * 0x9E3779B97F4A7C15) % (1 << 63)
        return CompletionRequest(
            prompt_ids, self.most_tokens, self.temperature, self.top_p, self.top_k, seed, tuple(self.stop_token_ids)
        )


class CompletionBody(Sampled):
    """Go on with texts, or with token ids."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_ANSWERS)]
        | Annotated[list[Id], Field(min_length=1)]
        | Annotated[list[Annotated[list[Id], Field(min_length=1)]], Field(min_length=1, max_length=MOST_ANSWERS)]
    ) = Field(description="a text, token ids, or several of either")
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="left out: as many as fit")
    echo: bool = Field(False, description="the prompt is part of the text")
    logprobs: Literal[0] | None = Field(None, description="0: of each sampled token; alternatives are not computed")

    @model_validator(mode="after")
    def _fits(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs: those of a prompt are not computed")
        if self.n * len(self.prompts) > MOST_ANSWERS:
            raise ValueError(f"{len(self.prompts)} prompts, n {self.n}: more than {MOST_ANSWERS} answers")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One by one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens


class TextPart(Body):
    """Of a message that is given in parts."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = Field(None, description="text; other kinds of content are not read")
    name: str | None = Field(None, max_length=256)
    tool_call_id: str | None = Field(None, max_length=256)
    tool_calls: list[dict[str, Any]] | None = Field(None, max_length=256, description="for the chat template, as given")
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, description="is passed over")

    def made(self) -> dict[str, Any]:
        """For the chat template."""
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or [])
        role = "system" if self.role == "developer" else self.role
        more = {name: getattr(self, name) for name in ("name", "tool_call_id", "tool_calls")}
        return {"role": role, "content": content} | {name: v for name, v in more.items() if v is not None}


class ChatBody(Sampled):
    """Answer a conversation, as the run's chat template writes it."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="the older name of max_completion_tokens")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="left out: as many as fit")
    logprobs: bool | None = Field(None, description="log-probability of each sampled token")
    top_logprobs: Literal[0] | None = Field(None, description="alternatives are not computed")

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
