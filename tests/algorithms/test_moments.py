import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_asyncflow.algorithms.moments import Moments, rescale
from mindspeed_asyncflow.config.schema import AlgorithmConfig

RANKS = (np.array([1.0, 2.0, 3.0]), np.array([10.0]))


def whitened(values, shift, factor):
    return (values - shift) * factor


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_whitening_uses_the_statistics_of_all_ranks_whoever_has_none_included(order):
    """B20: sample [-.7348, -.4899, -.2449] and [1.4697], population [-.8485, -.5657, -.2828] and [1.6971]; a rank
    without tokens sends the empty part."""
    parts = [Moments.of(RANKS[0]), Moments.of(RANKS[1]), Moments.of(np.array([]))]
    total = Moments()
    for i in order:
        total = total.merge(parts[i])
    shift, factor = rescale(AlgorithmConfig(advantage="reinforce_pp"), total, Moments())
    np.testing.assert_allclose(whitened(RANKS[0], shift, factor), [-0.734847, -0.489898, -0.244949], atol=1e-6)
    np.testing.assert_allclose(whitened(RANKS[1], shift, factor), [1.469694], atol=1e-6)
    population = (np.concatenate(RANKS) - total.mean) / total.variance**0.5
    np.testing.assert_allclose(population, [-0.848528, -0.565685, -0.282843, 1.697056], atol=1e-6)


def test_scaling_alone_leaves_the_mean():
    """B20: scale-only of the four values is [.2828, .5657, .8485, 2.8284]"""
    total = Moments.of(np.concatenate(RANKS))
    np.testing.assert_allclose(
        np.concatenate(RANKS) / total.variance**0.5, [0.282843, 0.565685, 0.848528, 2.828427], atol=1e-6
    )


def test_group_advantages_scaled_by_the_batch_divide_by_the_sample_deviation_of_rewards():
    cfg = AlgorithmConfig(advantage="grpo_batch", advantage_eps=0.0)
    shift, factor = rescale(cfg, Moments(), Moments.of(np.array([1.0, 0.0, 0.0, 1.0])))
    assert shift == 0 and factor == pytest.approx(1 / 0.577350, abs=1e-5)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_advantages_inside_groups_are_not_rescaled(advantage):
    assert rescale(AlgorithmConfig(advantage=advantage), Moments.of(RANKS[0]), Moments.of(RANKS[0])) == (0.0, 1.0)


def test_nothing_at_all_is_neither_nan_nor_an_error():
    shift, factor = rescale(AlgorithmConfig(advantage="gae"), Moments(), Moments())
    assert np.isfinite([shift, factor]).all()


@given(values=st.lists(st.floats(-1e3, 1e3), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_merged_parts_are_the_moments_of_the_whole(values, cuts):
    total = Moments()
    for part in np.split(np.array(values), sorted(c for c in cuts if c <= len(values))):
        total = total.merge(Moments.of(part))
    assert total.count == len(values)
    if values:
        assert total.mean == pytest.approx(np.mean(values), abs=1e-7)
        assert total.variance == pytest.approx(np.var(values), rel=1e-7, abs=1e-7)
