import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.data.prompts import Prompt, PromptSet
from mindspeed_asyncflow.data.stream import PromptStream, quotas
from mindspeed_asyncflow.errors import DataError


def prompts_of(*sizes, weights=()):
    rows = [Prompt(np.array([index], np.int32), "", str(index)) for index in range(sum(sizes))]
    return PromptSet(rows, [], sizes=list(sizes), weights=list(weights) or [1.0] * len(sizes))


def stream(*sizes, batch=4, epochs=1, drop_last=True, seed=0, weights=()):
    return PromptStream(prompts_of(*sizes, weights=weights), seed, epochs, drop_last, batch)


def indices(batches):
    return [[index for _, index, _ in batch] for batch in batches]


def test_one_source_keeps_the_order_that_it_always_had():
    """Saved positions of earlier runs depend on it: the permutations of the generator of (seed, 1, epoch)."""
    assert indices(stream(10, epochs=2)) == [[9, 1, 3, 8], [7, 6, 0, 4], [2, 7, 0, 4], [1, 6, 8, 9]]


@pytest.mark.parametrize("drop_last, sizes", [(True, [4, 4]), (False, [4, 4, 2])])
def test_the_end_of_the_data_is_clear(drop_last, sizes):
    """B45: 10 prompts, batch 4, one epoch."""
    batches = stream(10, epochs=1, drop_last=drop_last)
    assert not batches.exhausted
    assert [len(batch) for batch in batches] == sizes
    assert batches.exhausted and next(batches, None) is None


@pytest.mark.parametrize("drop_last, epochs", [(True, [0, 0, 1, 1, 2, 2, 3, 3]), (False, [0, 0, 0, 1, 1, 1, 2, 2])])
def test_eight_steps_reach_over_several_epochs(drop_last, epochs):
    """B45: 10 prompts, batch 4."""
    batches = stream(10, epochs=9, drop_last=drop_last)
    assert [next(batches)[0][0] for _ in range(8)] == epochs


def test_every_epoch_has_a_new_order_over_all_prompts_and_the_seed_decides_it():
    """B45"""
    batches = indices(stream(8, epochs=3))
    epochs = [first + second for first, second in zip(batches[::2], batches[1::2])]
    assert all(sorted(order) == list(range(8)) for order in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert indices(stream(8, epochs=3)) == indices(stream(8, epochs=3)) != indices(stream(8, epochs=3, seed=1))


def test_more_steps_than_data_is_told_before_the_first():
    """B88: 32 rows, batch 8, 10 steps."""
    with pytest.raises(DataError, match=r"data ends after 4 steps .*data\.epochs"):
        stream(32, batch=8, epochs=1).require(10)
    stream(32, batch=8, epochs=3).require(10)


@pytest.mark.parametrize("other", [{"rows": 11}, {"batch": 5}, {"seed": 1}, {"drop_last": False}])
def test_a_position_in_other_data_is_refused(other):
    saved = stream(10, epochs=4).state()
    with pytest.raises(DataError, match="saved data position has"):
        changed = {"rows": 10, "epochs": 4, **other}
        stream(changed.pop("rows"), **changed).restore(saved)


def test_a_position_under_other_weights_is_refused():
    saved = stream(10, 10, epochs=4).state()
    with pytest.raises(DataError, match=r"quotas=\[10, 10\], this run has \[15, 5\]"):
        stream(10, 10, epochs=4, weights=[3, 1]).restore(saved)


mixes = st.lists(st.tuples(st.integers(2, 30), st.floats(0.2, 5)), min_size=1, max_size=4)


def mixed(mix, **options):
    return stream(*(size for size, _ in mix), weights=[weight for _, weight in mix], **options)


@settings(max_examples=60, deadline=None)
@given(mixes, st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_each_source_has_its_share_and_uses_all_rows_equally_often(mix, batch, drop_last, seed):
    try:
        batches = list(mixed(mix, batch=batch, epochs=5, drop_last=drop_last, seed=seed))
    except DataError:
        return  # fewer rows than a batch, or a share below one row
    bounds = np.cumsum([0, *(size for size, _ in mix)])
    whole = sum(weight for _, weight in mix)
    per_epoch = Counter(epoch for each in batches for epoch, _, _ in each)
    used = Counter(index for batch in indices(batches) for index in batch)
    assert len(set(per_epoch.values())) == 1
    for (size, weight), first in zip(mix, bounds):
        times = [used[int(first) + row] for row in range(size)]
        if len(mix) > 1:  # one source drops rows of each epoch's own order
            assert max(times) - min(times) <= 1
        assert abs(sum(times) - 5 * per_epoch[0] * weight / whole) <= 5
    if len(mix) == 1 and not drop_last:
        assert set(used.values()) == {5}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(mixes, st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_going_on_at_any_position_equals_never_having_stopped(mix, batch, drop_last, seed):
    try:
        whole = indices(mixed(mix, batch=batch, epochs=3, drop_last=drop_last, seed=seed))
    except DataError:
        return
    first = mixed(mix, batch=batch, epochs=3, drop_last=drop_last, seed=seed)
    for position in range(len(whole) + 1):
        saved = json.loads(json.dumps(first.state()))
        second = mixed(mix, batch=batch, epochs=3, drop_last=drop_last, seed=seed)
        second.restore(saved)
        assert saved["exhausted"] == (position == len(whole))
        assert indices(second) == whole[position:]
        next(first, None)


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_quotas_sum_up_and_are_within_one_of_the_exact_share(rows, weights):
    shares = quotas(rows, weights)
    assert sum(shares) == rows
    assert all(abs(share - rows * weight / sum(weights)) < 1 for share, weight in zip(shares, weights))


def test_a_weight_too_small_for_one_prompt_an_epoch_is_refused():
    with pytest.raises(DataError, match="leave source 1 less than one of the 20 prompts"):
        stream(10, 10, weights=[100, 1])
