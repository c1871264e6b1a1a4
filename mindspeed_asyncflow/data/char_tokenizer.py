"""The tokenizer of the generated models: one token per character, roles and markers as whole tokens."""

from __future__ import annotations

from typing import Any

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # END is the EOS
TOKENS = [PAD, START, END, "system", "user", "assistant", "\n", *"0123456789", ">", "+", "="]

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_char_tokenizer() -> Any:
    """A fast tokenizer of the 20 `TOKENS`, with exact round trip. Any other character is an error, never dropped."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="<none>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"system|user|assistant|[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([PAD, START, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
