"""Prompts of a client to what the feed loop issues, by the way that those of a data set go."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.config.intake import DataConfig
from mindspeed_asyncflow.data.tokenizers import encode_prompts, with_system
from mindspeed_asyncflow.errors import DataError, ServiceError
from mindspeed_asyncflow.service.verbs import Prompt
from mindspeed_asyncflow.workflow.book import Issue


def encoded(prompts: Sequence[Prompt], tokenizer: Any, data: DataConfig) -> list[Issue]:
    """Not numbered yet. Raises `ServiceError` that names the prompt by its place in the call."""
    found: list[np.ndarray] = [np.empty(0, np.int32)] * len(prompts)
    system = data.system_prompt if data.chat else None
    for i, prompt in enumerate(prompts):
        talk = prompt.prompt if isinstance(prompt.prompt, list) else [{"role": "user", "content": ""}]
        if not talk or not all(isinstance(said, Mapping) and {"role", "content"} <= said.keys() for said in talk):
            raise ServiceError(422, "prompt", f"prompt {i} of the call: each message has a role and a content")
    texts = [(i, with_system(p.prompt, system)) for i, p in enumerate(prompts) if not isinstance(p.prompt, np.ndarray)]
    try:
        rows = encode_prompts(tokenizer, [text for _, text in texts], data.chat)
    except DataError as error:
        raise ServiceError(422, "prompt", str(error)) from error
    for (i, _), ids in zip(texts, rows):
        found[i] = ids
    for i, prompt in enumerate(prompts):
        if isinstance(prompt.prompt, np.ndarray):
            found[i] = _ids(i, prompt.prompt, len(tokenizer))
        if not 1 <= len(found[i]) <= data.max_prompt_tokens:
            raise ServiceError(
                422, "prompt", f"prompt {i} of the call has {len(found[i])} tokens; 1 to data.max_prompt_tokens "
                f"({data.max_prompt_tokens}) are possible"
            )  # fmt: skip
    return [Issue(0, -1, ids, p.truth, _fields(p, tokenizer, ids)) for p, ids in zip(prompts, found)]


def _ids(place: int, ids: np.ndarray, vocabulary: int) -> np.ndarray:
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary):
        raise ServiceError(
            422, "prompt", f"prompt {place} of the call: token ids are whole numbers from 0 to {vocabulary - 1}"
        )
    return ids.astype(np.int32)


def _fields(prompt: Prompt, tokenizer: Any, ids: np.ndarray) -> str:
    """As those of a data set, which scorers know."""
    asked = tokenizer.decode(ids.tolist()) if isinstance(prompt.prompt, np.ndarray) else prompt.prompt
    return json.dumps({"id": "", **prompt.fields, "source": 0, "prompt": asked}, ensure_ascii=False)
