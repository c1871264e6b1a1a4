"""One question and what its scorer compares with."""

from __future__ import annotations

import json
from dataclasses import dataclass

Message = dict[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class Problem:
    prompt: str | tuple[Message, ...]  # plain text, or a conversation for the chat template
    truth: str  # opaque to everybody but the scorer

    @property
    def text(self) -> str:
        """The prompt as one string; two problems with equal text are the same prompt."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, ensure_ascii=False)
