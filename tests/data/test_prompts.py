import json

import pytest

from mindspeed_asyncflow.config.schema import DataConfig
from mindspeed_asyncflow.data.char_tokenizer import make_char_tokenizer
from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.data.prompts import PromptSet, split_problems
from mindspeed_asyncflow.data.sources import Source, Sources, make_sources
from mindspeed_asyncflow.data.stream import PromptStream
from mindspeed_asyncflow.data.tokenizers import encode_prompts
from mindspeed_asyncflow.errors import DataError
from tests.data.test_tokenizers import word_tokenizer


class Texts:
    """The given prompts."""

    name = "texts"

    def __init__(self, *texts):
        self.texts = texts

    def problems(self, size, seed):
        return [Problem(text, "") for text in self.texts]

    def score(self, text, truth, finished):
        return 0.0


class Numbers:
    """The prompts 0 .. count-1, some of them repeated."""

    name = "numbers"

    def __init__(self, count, repeats=1):
        self.count, self.repeats = count, repeats

    def problems(self, size, seed):
        return [Problem(str(i), f"truth {i}") for i in range(self.count) for _ in range(self.repeats)]

    def score(self, text, truth, finished):
        return 0.0


def one(task):
    return Sources([Source(task, 10000)])


def build(count, heldout=0, limit=64, repeats=1, seed=0):
    data = DataConfig(size=10000, heldout=heldout, max_prompt_tokens=limit)
    return PromptSet.build(one(Numbers(count, repeats)), make_char_tokenizer(), data, seed)


def test_held_out_prompts_are_never_trained_on_even_where_texts_repeat():
    prompts = build(100, heldout=20, repeats=3)
    held = {prompt.text for prompt in prompts.heldout}
    assert len(held) == len(prompts.heldout) == 20
    assert len(prompts.train) == 240 and held.isdisjoint(prompt.text for prompt in prompts.train)


def test_the_split_depends_on_the_seed_only():
    problems = Numbers(50).problems(0, 0)
    assert split_problems(problems, 10, 1) == split_problems(problems, 10, 1)
    assert split_problems(problems, 10, 1) != split_problems(problems, 10, 2)


def test_each_prompt_keeps_its_ids_truth_and_text_together():
    """B39"""
    tokenizer = make_char_tokenizer()
    for prompt in build(30, heldout=5).train:
        assert prompt.truth == f"truth {prompt.text}" and tokenizer.decode(prompt.ids) == prompt.text
        assert prompt.ids.dtype == "int32"


def test_long_prompts_are_dropped_and_counted():
    prompts = build(110, heldout=0, limit=2)
    assert prompts.dropped_too_long == 10 and len(prompts.train) == 100


def test_default_task_fits():
    prompts = PromptSet.build(make_sources(DataConfig()), make_char_tokenizer(), DataConfig(), seed=0)
    assert (len(prompts.train), len(prompts.heldout), prompts.dropped_too_long) == (9600, 400, 0)


@pytest.mark.parametrize("count, heldout", [(5, 5), (5, 9)])
def test_holding_out_everything_is_an_error(count, heldout):
    with pytest.raises(DataError, match=f"data.heldout={heldout}"):
        build(count, heldout=heldout)


def test_fewer_usable_rows_than_a_batch_is_an_error_at_the_start():
    """B86: 5 rows of which 3 survive the length filter."""
    data = DataConfig(heldout=0, max_prompt_tokens=3)
    usable = PromptSet.build(one(Texts("1", "2", "3", "4444", "5555")), make_char_tokenizer(), data, 0)
    with pytest.raises(DataError, match="3 usable rows < batch 4"):
        PromptStream(usable, 0, 1, True, 4)
    assert [len(batch) for batch in PromptStream(usable, 0, 1, False, 4)] == [3]


def test_no_usable_row_at_all_is_an_error():
    """B86"""
    data = DataConfig(heldout=0, max_prompt_tokens=3)
    with pytest.raises(DataError, match="no usable rows: all 2 prompts are longer"):
        PromptSet.build(one(Texts("4444", "5555")), make_char_tokenizer(), data, 0)


def words(too_long="drop", limit=16, chat=False, **options):
    return DataConfig(heldout=0, max_prompt_tokens=limit, too_long=too_long, chat=chat, **options)


LENGTHS = (15, 16, 17, 500)


def of_lengths(*lengths):
    """Prompts of so many tokens each, BOS included; a tools column comes along."""
    return [
        Problem(" ".join("ab"[place % 2] for place in range(length - 1)), "", f"row {length}", {"tools": ["t"]})
        for length in lengths
    ]


class Given:
    name = "given"

    def __init__(self, problems):
        self.given = problems

    def problems(self, size, seed):
        return self.given

    def score(self, text, truth, finished):
        return 0.0


@pytest.mark.parametrize(
    "too_long, lengths, ends",
    [("drop", [15, 16], None), ("cut_left", [15, 16, 16, 16], (-15, None)), ("cut_right", [15, 16, 16, 16], (1, 16))],
)
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("part", ["train", "heldout"])
def test_long_prompts_are_dropped_or_cut_by_the_ids_that_the_engine_gets(too_long, lengths, ends, chat, part):
    """B85, B33: prompts of 15, 16, 17 and 500 tokens; a cut keeps one BOS in front."""
    tokenizer, data = word_tokenizer(), words(too_long, chat=chat)
    given = Source(Given(of_lengths(*LENGTHS)), 10)
    other = Source(Given([Problem("a", "")]), 10)
    sources = Sources([given]) if part == "train" else Sources([other], [given])
    prompts = PromptSet.build(sources, tokenizer, data, 0)
    chosen = prompts.train if part == "train" else prompts.heldout
    assert [len(prompt.ids) for prompt in chosen] == lengths
    for prompt in chosen:
        assert prompt.ids[0] == 0 and (prompt.ids[1:] != 0).all()  # one BOS
        assert json.loads(prompt.fields)["tools"] == ["t"]
    dropped = 4 - len(lengths)
    assert prompts.dropped_too_long == dropped
    (note,) = prompts.notes()
    assert note.startswith("2 prompts are longer" if dropped else "2 prompts were cut")
    if ends:
        (whole,) = encode_prompts(tokenizer, [of_lengths(17)[0].prompt], chat)
        assert chosen[2].ids[1:].tolist() == whole[slice(*ends)].tolist()


def test_a_prompt_that_is_too_long_can_be_refused_by_name():
    """B85"""
    with pytest.raises(DataError, match=r"prompt row 17 has 17 tokens, data\.max_prompt_tokens is 16"):
        PromptSet.build(one(Given(of_lengths(*LENGTHS))), word_tokenizer(), words("error"), 0)


def test_cuts_without_a_bos_keep_the_first_or_last_tokens():
    """B85"""
    for side, kept in (("cut_left", "5678"), ("cut_right", "1234")):
        prompts = PromptSet.build(one(Texts("12345678")), make_char_tokenizer(), words(side, limit=4), 0)
        assert make_char_tokenizer().decode(prompts.train[0].ids) == kept


def test_evaluation_prompts_that_are_all_too_long_are_an_error():
    """B86"""
    sources = Sources([Source(Texts("1", "2"), 10)], [Source(Texts("4444"), 10)])
    with pytest.raises(DataError, match="no usable evaluation prompts: all 1 are longer"):
        PromptSet.build(sources, make_char_tokenizer(), words(limit=3), 0)


def test_every_prompt_carries_what_scorers_need():
    """B39: the fields of a row stay with it through mix, split and drop."""
    rows = [Problem(str(i), f"truth {i}", fields={"row": i, "id": "not the id"}) for i in range(100, 120)]
    sources = Sources([Source(Numbers(20), 99), Source(Given(rows), 99)], [Source(Texts("7", "8888"), 9)])
    prompts = PromptSet.build(sources, make_char_tokenizer(), words(limit=3), 0)
    assert prompts.sizes == [19, 20] and prompts.dropped_too_long == 1
    assert prompts.notes()[0] == "1 training prompts are also in data.validation and were left out of training"
    for prompt in prompts.train:
        fields = json.loads(prompt.fields)
        number = int(prompt.text)
        second = number >= 100
        assert (fields["prompt"], prompt.truth) == (prompt.text, f"truth {number}")
        assert (fields["source"], fields["id"]) == (int(second), str(number - 100 * second))
        assert fields.get("row") == (number if second else None)
    assert [json.loads(prompt.fields)["source"] for prompt in prompts.heldout] == [2]


def test_held_out_prompts_of_a_mix_come_from_all_of_it():
    sources = Sources([Source(Numbers(60), 99), Source(Given([Problem(str(i), "") for i in range(100, 160)]), 99)])
    data = DataConfig(heldout=40)
    prompts = PromptSet.build(sources, make_char_tokenizer(), data, 0)
    held = {json.loads(prompt.fields)["source"] for prompt in prompts.heldout}
    assert held == {0, 1} and sum(prompts.sizes) == 80 and len(prompts.heldout) == 40


def test_a_source_without_a_usable_row_is_an_error():
    """B86"""
    sources = Sources([Source(Texts("1"), 9), Source(Texts("4444"), 9)])
    with pytest.raises(DataError, match=r"no usable rows in source texts of data\.mix"):
        PromptSet.build(sources, make_char_tokenizer(), words(limit=3), 0)
    with pytest.raises(DataError, match=r"every training prompt is also in data\.validation"):
        PromptSet.build(Sources([Source(Texts("1"), 9)], [Source(Texts("1"), 9)]), make_char_tokenizer(), words(), 0)


def test_the_system_prompt_goes_before_every_conversation_that_has_none():
    """B33"""
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    own = ({"role": "system", "content": "b b"}, {"role": "user", "content": "a"})
    problems = [Problem("a", ""), Problem(({"role": "user", "content": "a a"},), ""), Problem(own, "")]
    data = words(chat=True, system_prompt="b")
    prompts = PromptSet.build(one(Given(problems)), word_tokenizer(template), data, 0).train
    assert [prompt.ids.tolist() for prompt in prompts] == [[0, 3, 2], [0, 3, 2, 2], [0, 3, 3, 2]]
    shown = json.loads(prompts[0].fields)["prompt"]
    assert shown == [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]
