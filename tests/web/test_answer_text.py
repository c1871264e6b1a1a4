"""Tokens as text that only grows, for any way in which characters are cut into tokens."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mindspeed_asyncflow.web.answer_text import UNFINISHED, AnswerText

TEXT = "naïve: 漢字, 👩‍🚀 und Übermut.\n \tEnd… of 𝔘nicode"


@pytest.fixture(scope="module")
def bytewise():
    """One token per byte: most characters of TEXT are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def pieces(tokenizer, ids, stops=(), ask_every=1):
    """What is shown after every so many tokens, the text, and how many tokens were taken."""
    answer, shown = AnswerText(tokenizer, (), stops), []
    for count, token in enumerate(ids, 1):
        answer.push(token, 0.0)
        if answer.stopped:
            break
        if count % ask_every == 0:
            shown.append(answer.fresh(final=False))
    shown.append(answer.fresh(final=True))
    return shown, answer.text, count


@pytest.mark.parametrize("ask_every", [1, 3, 1000])
def test_pieces_are_whole_characters_and_make_up_the_text(bytewise, ask_every):
    ids = bytewise(TEXT)["input_ids"]
    assert len(ids) > len(TEXT) + 15
    shown, whole, _ = pieces(bytewise, ids, ask_every=ask_every)
    assert "".join(shown) == whole == TEXT and UNFINISHED not in whole


def test_a_stop_string_is_found_however_it_is_cut_and_nothing_of_it_is_shown(bytewise):
    draw = random.Random(0)
    met = 0
    for _ in range(200):
        said = "".join(draw.choices("ab漢", k=30))
        stops = ["".join(draw.choices("ab漢", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 3))]
        shown, whole, taken = pieces(bytewise, bytewise(said)["input_ids"], stops, draw.randint(1, 4))
        ends = [said.find(stop) + len(stop) for stop in stops if stop in said]
        if not ends:
            assert "".join(shown) == whole == said
            continue
        met += 1
        first = min(ends)  # the string that is complete first ends the answer
        want = min(said.find(stop) for stop in stops if stop in said[:first])
        assert "".join(shown) == whole == said[:want], (said, stops)
        assert taken == len(bytewise(said[:first])["input_ids"])
    assert 50 < met < 200


def test_bytes_that_are_no_text_are_shown_as_such_in_the_end_and_cost_no_more_than_they_must(bytewise):
    ids = bytewise("ok")["input_ids"] + bytewise("漢")["input_ids"][:2]
    shown, whole, _ = pieces(bytewise, ids)
    assert shown[:2] == ["o", "k"] and whole.startswith("ok") and whole.endswith(UNFINISHED)
    broken = bytewise("漢")["input_ids"][1:2] * 400
    assert pieces(bytewise, broken)[1].count(UNFINISHED) == 400


def test_tokens_know_their_own_text_and_where_they_begin(bytewise):
    answer = AnswerText(bytewise, bytewise("!")["input_ids"])
    told = [answer.push(token, -0.5) for token in bytewise("a漢b!")["input_ids"]]
    assert [t.offset for t in told] == [0, 1, 1, 1, 2, 3] and told[0].text == "a" and told[1].text == UNFINISHED
    assert told[-1].text == "!" and answer.fresh(final=True) == "a漢b"
