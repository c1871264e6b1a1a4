import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from mindspeed_asyncflow.data.char_tokenizer import END, PAD, make_char_tokenizer
from mindspeed_asyncflow.data.tokenizers import (
    decode_answers,
    encode_prompts,
    load_tokenizer,
    stop_token_ids,
)
from mindspeed_asyncflow.errors import DataError

BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
USER = [{"role": "user", "content": "a b"}]


def encode_prompt(tokenizer, prompt, chat):
    return encode_prompts(tokenizer, [prompt], chat)[0]


def word_tokenizer(template=BOS_TEMPLATE, adds_bos=True, adds_eos=True, bos="<s>"):
    """Llama-like: <s> in front of everything, </s> behind."""
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "a", "b"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        single = "<s> $A </s>" if adds_eos else "<s> $A"
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token="</s>", pad_token="</s>", chat_template=template
    )


@pytest.mark.parametrize(
    "prompt, chat",
    [
        (USER, True),
        (USER, False),
        ("a b", True),
        ("a b", False),
        ("<s>a b", False),
        ("<s>a b", True),
        ("<s><s>a b", False),
    ],
)
@pytest.mark.parametrize("adds_eos", [True, False])
def test_every_form_of_prompt_starts_with_exactly_one_bos(prompt, chat, adds_eos):
    """B33"""
    assert encode_prompt(word_tokenizer(adds_eos=adds_eos), prompt, chat).tolist() == [0, 2, 3]


@pytest.mark.parametrize("prompt, chat", [(USER, True), ("a b", False)])
def test_a_template_that_forgets_the_bos_of_its_tokenizer_gets_it(prompt, chat):
    """B33"""
    tokenizer = word_tokenizer(template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert encode_prompt(tokenizer, prompt, chat).tolist() == [0, 2, 3]


def test_a_tokenizer_that_adds_no_bos_gets_none():
    """B33: Qwen has none at all; SmolLM2 names one that it does not put in front."""
    assert encode_prompt(word_tokenizer(adds_bos=False), "a b", chat=False).tolist() == [2, 3]
    assert encode_prompt(word_tokenizer(adds_bos=False, bos=None), "a b", chat=False).tolist() == [2, 3]


def test_a_missing_template_is_a_clear_error_and_plain_text_still_works():
    """B33"""
    tokenizer = word_tokenizer(template=None)
    with pytest.raises(DataError, match=r"no chat template: set data\.chat: false"):
        encode_prompt(tokenizer, "a", chat=True)
    assert encode_prompt(tokenizer, "a", chat=False).tolist() == [0, 2]


def test_a_template_file_takes_the_place_of_the_tokenizers_own(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"\xef\xbb\xbf{% for m in messages %}b {{ m['content'] }}{% endfor %}")
    tokenizer = load_tokenizer(str(tmp_path), str(file))
    assert encode_prompt(tokenizer, "a", chat=True).tolist() == [0, 3, 2]
    with pytest.raises(DataError, match=r"data\.chat_template .*none\.jinja cannot be read"):
        load_tokenizer(str(tmp_path), str(tmp_path / "none.jinja"))
    file.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"the chat template fails on .*roles must alternate"):
        encode_prompt(load_tokenizer(str(tmp_path), str(file)), "a", chat=True)


def test_many_prompts_encode_as_each_alone():
    tokenizer = make_char_tokenizer()
    together = encode_prompts(tokenizer, ["7302>", "1>", "23"], chat=True)
    alone = [encode_prompt(tokenizer, prompt, chat=True) for prompt in ("7302>", "1>", "23")]
    assert [row.tolist() for row in together] == [row.tolist() for row in alone]
    assert together[0].dtype == np.int32 and encode_prompts(tokenizer, [], chat=False) == []


def test_the_char_tokenizer_has_one_token_per_character_and_round_trips():
    tokenizer = make_char_tokenizer()
    assert len(tokenizer) == 20
    ids = encode_prompt(tokenizer, "7302+9=1>", chat=False)
    assert len(ids) == 9 and tokenizer.decode(ids) == "7302+9=1>"
    chat = encode_prompt(tokenizer, "12>", chat=True)
    assert tokenizer.decode(chat) == "<|im_start|>user\n12><|im_end|>\n<|im_start|>assistant\n" and len(chat) == 11


def test_a_character_that_the_tokenizer_lacks_is_an_error_not_dropped():
    with pytest.raises(DataError, match="73a2>"):
        encode_prompts(make_char_tokenizer(), ["12>", "73a2>", "34>"], chat=False)


def test_reloading_keeps_the_ids_here_and_under_auto_tokenizer(tmp_path):
    make_char_tokenizer().save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    for tokenizer in (load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)):
        for chat in (False, True):
            expected = encode_prompt(make_char_tokenizer(), "7302>", chat)
            assert encode_prompt(tokenizer, "7302>", chat).tolist() == expected.tolist()
        assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (END, PAD, None)


def test_answers_lose_only_the_end_tokens_at_their_end():
    """B28: an EOS-valued id in the middle is content, also where pad and EOS are the same id."""
    tokenizer = make_char_tokenizer()
    eos, pad, one, two = (tokenizer.convert_tokens_to_ids(token) for token in (END, PAD, "1", "2"))
    answers = [[one, two, eos], [one, two], [one, eos, two, eos, pad, pad], [eos], [], [pad, one]]
    texts = decode_answers(tokenizer, [np.array(a, np.int32) for a in answers], [eos])
    assert texts == ["12", "12", f"1{END}2", "", "", f"{PAD}1"]
    assert decode_answers(word_tokenizer(), [np.array([2, 1, 3, 1, 1])], [1]) == ["a </s> b"]


@pytest.mark.parametrize("named, expected", [(None, (2,)), (7, (2, 7)), ([7, 2, 5], (2, 5, 7))])
def test_stop_ids_are_those_of_tokenizer_and_generation_config(tmp_path, named, expected):
    if named is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert stop_token_ids(str(tmp_path), make_char_tokenizer()) == expected


def test_a_folder_without_tokenizer_or_without_end_token_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer_config\.json"):
        load_tokenizer(str(tmp_path))
    endless = make_char_tokenizer()
    endless.eos_token = None
    with pytest.raises(DataError, match="no end-of-text token"):
        stop_token_ids(str(tmp_path), endless)
