"""One question and what its scorer compares with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class Problem:
    prompt: str | tuple[Message, ...]  # plain text, or a conversation for the chat template
    truth: str  # opaque to everybody but the scorer
    id: str | None = None  # None: its number in its source stands for it
    fields: dict[str, Any] = field(default_factory=dict)  # what else the data has, as JSON values

    @property
    def text(self) -> str:
        """The prompt as one string; two problems with equal text are the same prompt."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, ensure_ascii=False)
