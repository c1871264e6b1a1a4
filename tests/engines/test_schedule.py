"""The learning rate as a function of applied steps."""

import itertools

import pytest

from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.engines.training import learning_rate


def rates(decay, steps=10, warmup=4):
    trainer = TrainerConfig(lr=1.0, lr_warmup_steps=warmup, lr_decay=decay, steps=steps)
    return [learning_rate(k, trainer) for k in range(steps + 3)]


def test_warm_up_never_wastes_a_step_and_ends_at_the_peak():
    assert rates("constant")[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_constant_stays():
    assert set(rates("constant")[3:]) == {1.0}


def test_linear_falls_to_zero_at_the_last_step_and_stays():
    assert rates("linear")[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0, 0])


def test_cosine_is_half_way_in_the_middle():
    found = rates("cosine", steps=8, warmup=0)
    assert found[0] == 1.0 and found[4] == pytest.approx(0.5) and found[8] == pytest.approx(0.0)
    assert all(a >= b for a, b in itertools.pairwise(found))


def test_its_unit_is_the_optimizer_step_whoever_shares_a_batch_and_whenever_the_run_was_started():
    """B62: half the peak after 5 of 10 steps of warm-up; 0.4 after 12 of 20 steps of a linear fall."""
    rising = TrainerConfig(lr=1.0, lr_warmup_steps=10, steps=100, data_parallel=4)
    assert learning_rate(5 - 1, rising) == pytest.approx(0.5)
    falling = TrainerConfig(lr=1.0, lr_warmup_steps=0, lr_decay="linear", steps=20)
    assert learning_rate(12, falling) == pytest.approx(0.4)
