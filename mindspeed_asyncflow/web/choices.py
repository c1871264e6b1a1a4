"""One answer of a completion call: parts from the replicas, in; choices as OpenAI's interface has them, out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_asyncflow.service.verbs import CompletionPart, CompletionRequest, ServedModel
from mindspeed_asyncflow.web.answer_text import UNFINISHED, AnswerText, TokenText
from mindspeed_asyncflow.web.completion_bodies import Sampled


@dataclass(frozen=True, slots=True)
class News:
    """What is new of an answer, or all of it."""

    choice: Choice
    text: str
    tokens: Sequence[TokenText]
    version: int | None  # oldest that sampled one of these tokens
    finish_reason: str | None

    def facts(self) -> dict[str, Any]:
        """What every form of a choice has."""
        return {"index": self.choice.index, "finish_reason": self.finish_reason, "version": self.version}


class Choice:
    """`before`: text of the prompt, where it is echoed."""

    def __init__(
        self, body: Sampled, model: ServedModel, request: CompletionRequest, index: int, before: str = ""
    ) -> None:
        self.request, self.index = request, index
        self.finish_reason: str | None = None
        self.tokens: list[TokenText] = []
        self.version: int | None = None  # oldest that sampled one of them
        self.newest = model.version
        self._silent = {*model.stop_token_ids, *body.stop_token_ids}
        self._text, self._before = AnswerText(model.tokenizer, self._silent, body.stops), before

    def whole(self) -> News:
        return News(self, self._before + self._text.text, self.tokens, self.version, self.finish_reason)

    def take(self, part: CompletionPart) -> News:
        """New text and new tokens. A stop string in them ends the answer, with the token that completes it."""
        before = self._before if not self.tokens else ""
        new: list[TokenText] = []
        for token_id, logprob in zip(part.token_ids.tolist(), part.logprobs.tolist()):
            new.append(self._text.push(token_id, logprob))
            if self._text.stopped:
                break
        self.tokens += new
        if new:
            self.version = part.version if self.version is None else min(self.version, part.version)
            self.newest = max(self.newest, part.version)
        self.finish_reason = "stop" if self._text.stopped else part.finish_reason
        text = before + self._text.fresh(final=self.finish_reason is not None)
        return News(self, text, new, part.version if new else self.version, self.finish_reason)


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    def entry(token: TokenText) -> dict[str, Any]:
        known = list(token.text.encode()) if UNFINISHED not in token.text else None
        return {"token": token.text, "logprob": token.logprob, "bytes": known, "top_logprobs": []}

    return {"content": [entry(token) for token in tokens], "refusal": None}


def text_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": None,
        "text_offset": [token.offset for token in tokens],
    }


def usage(prompts: Sequence[int], choices: Sequence[Choice]) -> dict[str, int]:
    """`prompts`: tokens of each prompt, which count once however many answers it has."""
    answered = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": answered,
        "total_tokens": sum(prompts) + answered,
    }
