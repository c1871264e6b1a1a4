"""Replies as ids: they follow what the model has seen, and nothing that was sampled is encoded again."""

import numpy as np
import pytest

from mindspeed_asyncflow.data.char_tokenizer import END, make_char_tokenizer
from mindspeed_asyncflow.environments.base import MODEL, REPLY, Turn
from mindspeed_asyncflow.environments.rendering import PlainReplies, TemplateReplies
from mindspeed_asyncflow.errors import DataError

TALK = [Turn(MODEL, "7"), Turn(REPLY, "4")]


@pytest.fixture
def tokenizer():
    return make_char_tokenizer()


def text(tokenizer, rendered):
    return tokenizer.decode(rendered.ids, skip_special_tokens=False)


def test_plain_replies_stand_between_their_markers(tokenizer):
    rendered = PlainReplies(tokenizer, ">", "=").render("3", "7", TALK)
    assert text(tokenizer, rendered) == ">4=" and rendered.ids.dtype == np.int32


def test_a_reply_ends_the_turn_as_the_template_does_and_opens_the_next(tokenizer):
    replies = TemplateReplies(tokenizer, "user", [tokenizer.eos_token_id])
    rendered = replies.render("3", f"7{END}", TALK)
    assert not rendered.drifted
    seen = f"<|im_start|>user\n3{END}\n<|im_start|>assistant\n7{END}"
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3"}, {"role": "assistant", "content": "7"}, {"role": "user", "content": "4"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert seen + text(tokenizer, rendered) == whole


def test_what_the_template_would_show_in_other_words_is_marked_and_goes_on(tokenizer):
    """A template that trims: the model has seen a line end that it would not see again."""
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'].strip()")
    replies = TemplateReplies(tokenizer, "user", [tokenizer.eos_token_id])
    trimmed = replies.render("3", f"7\n{END}", [Turn(MODEL, "7\n"), Turn(REPLY, "4")])
    assert trimmed.drifted
    assert text(tokenizer, trimmed) == text(tokenizer, replies.render("3", f"7{END}", TALK))


def test_a_template_that_rewrites_earlier_turns_is_refused_at_start(tokenizer):
    """Templates that take the thinking out of all but the last turn."""
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'].split('</think>')[-1]")
    with pytest.raises(DataError, match=r"shows earlier turns .* Set turns.role to tool"):
        TemplateReplies(tokenizer, "user", [tokenizer.eos_token_id])


def test_a_role_that_the_template_refuses_and_a_missing_template_are_told_at_start(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(DataError, match="role 'tool': no tools here"):
        TemplateReplies(tokenizer, "tool", [2])
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has none"):
        TemplateReplies(tokenizer, "user", [2])


def test_a_reply_without_tokens_is_an_error_of_its_own(tokenizer):
    with pytest.raises(DataError, match="cannot encode the reply"):
        PlainReplies(tokenizer, "", "").render("3", "7", [Turn(REPLY, "hello")])
