import json

import pytest

from mindspeed_asyncflow.config.schema import DataConfig
from mindspeed_asyncflow.data.char_tokenizer import make_char_tokenizer
from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.data.prompts import PromptSet, split_problems
from mindspeed_asyncflow.data.sources import Source, Sources, make_sources
from mindspeed_asyncflow.data.stream import PromptStream
from mindspeed_asyncflow.errors import DataError


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


def stream(rows, batch, epochs=1, drop_last=True, seed=0):
    return PromptStream(build(rows), seed, epochs, drop_last, batch)


def indices(batches):
    return [[index for _, index, _ in batch] for batch in batches]


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


@pytest.mark.parametrize("drop_last, sizes", [(True, [4, 4]), (False, [4, 4, 2])])
def test_the_end_of_the_data_is_clear(drop_last, sizes):
    """B45: 10 prompts, batch 4, one epoch."""
    batches = stream(10, 4, epochs=1, drop_last=drop_last)
    assert not batches.exhausted
    assert [len(batch) for batch in batches] == sizes
    assert batches.exhausted and next(batches, None) is None


@pytest.mark.parametrize("drop_last, epochs", [(True, [0, 0, 1, 1, 2, 2, 3, 3]), (False, [0, 0, 0, 1, 1, 1, 2, 2])])
def test_eight_steps_reach_over_several_epochs(drop_last, epochs):
    """B45: 10 prompts, batch 4."""
    batches = stream(10, 4, epochs=9, drop_last=drop_last)
    assert [next(batches)[0][0] for _ in range(8)] == epochs


def test_every_epoch_has_a_new_order_over_all_prompts_and_the_seed_decides_it():
    """B45"""
    batches = indices(stream(8, 4, epochs=3))
    epochs = [first + second for first, second in zip(batches[::2], batches[1::2])]
    assert all(sorted(order) == list(range(8)) for order in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert indices(stream(8, 4, 3)) == indices(stream(8, 4, 3)) != indices(stream(8, 4, 3, seed=1))


def test_more_steps_than_data_is_told_before_the_first():
    """B88: 32 rows, batch 8, 10 steps."""
    with pytest.raises(DataError, match=r"data ends after 4 steps .*data\.epochs"):
        stream(32, 8, epochs=1).require(10)
    stream(32, 8, epochs=3).require(10)


def test_a_saved_position_goes_on_exactly_there():
    first = stream(10, 4, epochs=4)
    for _ in range(3):
        next(first)
    saved = json.loads(json.dumps(first.state()))
    second = stream(10, 4, epochs=4)
    second.restore(saved)
    assert indices(second) == indices(first)
    assert first.state()["exhausted"] and not saved["exhausted"]


@pytest.mark.parametrize("other", [{"rows": 11}, {"batch": 5}, {"seed": 1}, {"drop_last": False}])
def test_a_position_in_other_data_is_refused(other):
    saved = stream(10, 4, epochs=4).state()
    with pytest.raises(DataError, match="saved data position has"):
        stream(**{"rows": 10, "batch": 4, "epochs": 4, **other}).restore(saved)
