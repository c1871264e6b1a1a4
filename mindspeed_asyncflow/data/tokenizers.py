"""Tokenizers as this project uses them: prompts to ids once, answers back to text for scoring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_asyncflow.data.problem import Message
from mindspeed_asyncflow.errors import DataError


def load_tokenizer(folder: str, chat_template: str | None = None) -> Any:
    """The Hugging Face tokenizer kept in a model folder. Raises `DataError` if there is none.

    `chat_template` is a file with a Jinja template that takes the place of the tokenizer's own (data.chat_template).

    A tokenizer.json is taken as it is: `AutoTokenizer` would rebuild it by the rules of the model's family, which
    changes ids where a folder pairs one family's model with another's tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (Path(folder) / "tokenizer_config.json").exists():
        raise DataError(f"{folder} holds no tokenizer (tokenizer_config.json is missing); check model.source")
    exact = (Path(folder) / "tokenizer.json").exists()
    tokenizer = (PreTrainedTokenizerFast if exact else AutoTokenizer).from_pretrained(folder, local_files_only=True)
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    return tokenizer


def set_chat_template(tokenizer: Any, file: str) -> None:
    """Give `tokenizer` the Jinja template in `file`. Raises `DataError` if it cannot be read."""
    try:
        template = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template {file} cannot be read: {error}") from error
    if not template.strip():
        raise DataError(f"data.chat_template {file} is empty")
    tokenizer.chat_template = template


def stop_token_ids(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end an answer: those of generation_config.json and the tokenizer's EOS, sorted."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    file = Path(folder) / "generation_config.json"
    if file.exists():
        named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ids.update(named if isinstance(named, list) else [] if named is None else [named])
    if not ids:
        raise DataError(f"{folder} names no end-of-text token in its tokenizer or generation_config.json")
    return tuple(sorted(ids))


def encode_prompts(tokenizer: Any, prompts: Sequence[str | Sequence[Message]], chat: bool) -> list[np.ndarray]:
    """int32 [P] ids of each prompt; the one way from text to ids for training, evaluation and length filters.

    `chat` wraps a plain prompt as a user message; a list of messages always goes through the template. A result
    starts with exactly one BOS if the tokenizer itself adds one or the text brings one, else with none, and never
    ends with an EOS that the tokenizer would append.
    """
    texts = [prompt if isinstance(prompt, str) and not chat else _render(tokenizer, prompt) for prompt in prompts]
    try:
        rows = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    except Exception as error:  # boundary: the Rust tokenizer raises bare Exception for a character it lacks
        bad = next((text for text in texts if not _encodes(tokenizer, text)), texts[0])
        raise DataError(f"the tokenizer cannot encode the prompt {bad[:80]!r}: {error}") from error
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("")["input_ids"][:1] == [bos]
    return [np.asarray(_one_bos(row, bos, adds_bos), dtype=np.int32) for row in rows]


def _encodes(tokenizer: Any, text: str) -> bool:
    try:
        tokenizer(text, add_special_tokens=False)
    except Exception:  # boundary: as above
        return False
    return True


def _render(tokenizer: Any, prompt: str | Sequence[Message]) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the tokenizer has no chat template: set data.chat: false and give prompts as plain text")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # boundary: a template is somebody's program and raises what it likes
        raise DataError(f"the chat template fails on {str(messages)[:120]}: {error}") from error


def with_system(prompt: str | Sequence[Message], system: str | None) -> str | Sequence[Message]:
    """`prompt` as a conversation that begins with the `system` message, unless it has one or there is none to put."""
    if not system:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return messages if messages[0]["role"] == "system" else [{"role": "system", "content": system}, *messages]


def cut(tokenizer: Any, ids: np.ndarray, limit: int, side: str) -> np.ndarray:
    """int32 [limit]: the first of `ids` (side "cut_right"), or the last ones behind the BOS ("cut_left")."""
    if side == "cut_right":
        return ids[:limit]
    if tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id:
        return np.concatenate([ids[:1], ids[len(ids) - limit + 1 :]])
    return ids[len(ids) - limit :]


def _one_bos(ids: list[int], bos: int | None, adds_bos: bool) -> list[int]:
    if bos is None:
        return ids
    while ids[:2] == [bos, bos]:
        ids = ids[1:]
    return [bos, *ids] if adds_bos and ids[:1] != [bos] else ids


def decode_answers(tokenizer: Any, answers: Sequence[np.ndarray], stop_ids: Sequence[int]) -> list[str]:
    """Answers (each int [L]) as text. EOS and padding are left out at the end only: elsewhere they are content."""
    silent = {*stop_ids, tokenizer.pad_token_id}
    kept = []
    for answer in answers:
        end = len(answer)
        while end and int(answer[end - 1]) in silent:
            end -= 1
        kept.append([int(token) for token in answer[:end]])
    return tokenizer.batch_decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
