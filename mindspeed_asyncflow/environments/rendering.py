"""Replies as token ids that follow what the model has seen, and the check that the chat template agrees.

What the template makes of the prompt, the model's turns and the reply must begin with what the model has seen (the
prompt, the tokens that it sampled, earlier replies); the rest is the reply. Ids that were sampled are never encoded
again: only the rest is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mindspeed_asyncflow.environments.base import MODEL, Turn
from mindspeed_asyncflow.errors import DataError

Message = dict[str, str]
_SAMPLE = "<think>\nseven\n</think>\n\nIt is 7."  # what templates rewrite in earlier turns


class Rendered(NamedTuple):
    ids: np.ndarray  # int32 [R]
    drifted: bool = False  # the template would show the earlier turns in other words than the model saw


class PlainReplies:
    """Without a chat template: the reply's text between two markers."""

    def __init__(self, tokenizer: Any, start: str, end: str) -> None:
        self.tokenizer, self.start, self.end = tokenizer, start, end

    def render(self, prompt: str | Sequence[Message], seen: str, turns: Sequence[Turn]) -> Rendered:
        return Rendered(_ids(self.tokenizer, self.start + turns[-1].text + self.end))


class TemplateReplies:
    """With a chat template: the reply as a message of `role`, and the start of the model's next message.

    Raises `DataError` for a template that changes earlier turns when a reply follows, e.g. takes out their thinking.
    """

    def __init__(self, tokenizer: Any, role: str, stop_ids: Sequence[int]) -> None:
        self.tokenizer, self.role = tokenizer, role
        self.stops = [tokenizer.decode([i]) for i in stop_ids]
        self._check()

    def render(self, prompt: str | Sequence[Message], seen: str, turns: Sequence[Turn]) -> Rendered:
        """The reply `turns[-1]`. `seen`: all tokens after the prompt as text, the special ones included.

        Where the template does not show `seen` as it was (it trims spaces, say), the reply is what it makes of it
        after a neutral conversation, and is marked as drifted.
        """
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        rest = self._after(before, seen, turns)
        if rest is not None:
            return Rendered(_ids(self.tokenizer, rest))
        neutral = self._after(before, "0", [Turn(MODEL, "0"), turns[-1]])
        if neutral is None:
            raise DataError(f"{self._name()}: a reply after {prompt!r:.80} cannot be told apart from what comes before")
        stop = next((s for s in self.stops if s and neutral.startswith(s)), "")  # the model has sampled its own
        return Rendered(_ids(self.tokenizer, neutral[len(stop) :]), drifted=True)

    def _after(self, before: list[Message], seen: str, turns: Sequence[Turn]) -> str | None:
        """What the template writes after the prompt and `seen`; None if it does not begin with these."""
        messages = [{"role": MODEL if t.role == MODEL else self.role, "content": t.text} for t in turns]
        asked = self._text(before)
        whole = self._text(before + messages)
        return whole[len(asked) + len(seen) :] if whole.startswith(asked + seen) else None

    def _text(self, messages: list[Message]) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # boundary: templates raise whatever they like, e.g. for a role that they lack
            raise DataError(f"{self._name()} refuses a conversation with role {self.role!r}: {error}") from error

    def _name(self) -> str:
        return f"the chat template of {getattr(self.tokenizer, 'name_or_path', '') or 'the tokenizer'}"

    def _check(self) -> None:
        """Whether thinking, several turns and replies of any form stay as they are; see the class."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError("turns with data.chat need a chat template, and the tokenizer has none")
        seen, turns = "", []
        before = [{"role": "user", "content": "3"}]
        for text in (_SAMPLE, "9"):
            turns += [Turn(MODEL, text), Turn("", "4")]
            rest = self._after(before, seen + text, turns)
            if rest is None:
                raise DataError(
                    f"{self._name()} shows earlier turns of the model in other words once a reply of role "
                    f"{self.role!r} follows, so the model would be trained on what it never sees again. Set "
                    "turns.role to tool, or data.chat_template to a template that keeps all turns as they were"
                )
            seen += text + rest


def replies_of(tokenizer: Any, chat: bool, role: str, start: str, end: str, stop_ids: Sequence[int]) -> Any:
    """`chat`: prompts go through the chat template."""
    return TemplateReplies(tokenizer, role, stop_ids) if chat else PlainReplies(tokenizer, start, end)


def _ids(tokenizer: Any, text: str) -> np.ndarray:
    try:
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    except Exception as error:  # boundary: the Rust tokenizer raises bare Exception for a character it lacks
        raise DataError(f"the tokenizer cannot encode the reply {text[:80]!r}: {error}") from error
