"""The tokenizer of the generated models: one token per character, roles and markers as whole tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # END is the EOS
ROLES = ["system", "user", "assistant"]
CHARACTERS = ["\n", *"0123456789", ">", "+", "="]
ARITHMETIC = [*CHARACTERS, "-", "*", "(", ")"]

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokens_of(characters: Sequence[str] = CHARACTERS) -> list[str]:
    """All tokens, in the order of their ids."""
    return [PAD, START, END, *ROLES, *characters]


def make_char_tokenizer(characters: Sequence[str] = CHARACTERS) -> Any:
    """A fast tokenizer of `tokens_of(characters)`, with exact round trip. Any other character is an error, never
    dropped.

    Built from the same pieces as Qwen2's (byte-level BPE, here without merges): `AutoTokenizer` rebuilds a
    tokenizer that lies beside a Qwen2 config from its vocabulary alone, and must come to the same ids.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spelled = {"\n": "Ċ"}  # how byte-level vocabularies write a line end
    vocabulary = {spelled.get(token, token): index for index, token in enumerate(tokens_of(characters))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<none>"))  # absent on purpose: unknown raises
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([PAD, START, END])
    core.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
