"""Which tokens of a micro-batch are computed."""

import numpy as np
from tiny_models import pack

from mindspeed_asyncflow.engines.megatron.trim import trim


def sample(ids, mask):
    return {"ids": np.array(ids), "mask": np.array(mask, np.float32), "advantage": 1.0}


def test_tokens_behind_the_last_trained_one_are_left_out():
    """B78: what is left keeps its positions and boundaries."""
    batch = pack([sample([1, 2, 3], [0, 1, 0]), sample([4, 5], [1, 0]), sample([6, 7, 8, 9], [0, 0, 1, 0])])
    part = trim(batch)
    assert part.input_ids.tolist() == [1, 2, 4, 6, 7, 8]
    assert part.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert part.targets.tolist() == [2, 3, 5, 7, 8, 9]
    assert part.ends.tolist() == [2, 3, 6]
    assert part.origin.tolist() == [0, 1, 3, 5, 6, 7]
    assert part.trained.tolist() == [False, True, True, False, False, True]


def test_gaps_inside_an_answer_stay():
    part = trim(pack([sample([1, 2, 3, 4, 5], [1, 0, 0, 1, 0])]))
    assert part.input_ids.tolist() == [1, 2, 3, 4] and part.trained.tolist() == [True, False, False, True]


def test_a_sample_without_a_trained_token_is_left_out_whole():
    part = trim(pack([sample([1, 2], [0, 0]), sample([3, 4], [1, 0]), sample([5, 6, 7], [0, 0, 0])]))
    assert part.input_ids.tolist() == [3] and part.ends.tolist() == [1]


def test_nothing_trained_leaves_nothing():
    for batch in (None, pack([sample([1, 2, 3], [0, 0, 0])])):
        part = trim(batch)
        assert len(part.input_ids) == len(part.ends) == len(part.origin) == 0
