import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.algorithms.advantages import ADVANTAGES, group_advantages
from mindspeed_asyncflow.config.schema import AlgorithmConfig
from mindspeed_asyncflow.errors import RewardError
from tests.algorithms import references


def config(**changes):
    return AlgorithmConfig(**{"group_size": 4, "advantage_eps": 0.0, **changes})


@pytest.mark.parametrize("eps, value", [(1e-6, 0.866024), (1e-4, 0.865875), (1e-5, 0.866010)])
def test_grpo_uses_the_sample_standard_deviation(eps, value):
    """F1"""
    result = group_advantages([1, 0, 0, 1], [7] * 4, config(advantage_eps=eps))
    np.testing.assert_allclose(result.values, [value, -value, -value, value], atol=1e-6)


def test_dr_grpo_only_subtracts_the_mean():
    """F2"""
    result = group_advantages([1, 0, 0, 1], [7] * 4, config(advantage="dr_grpo", advantage_eps=1.0))
    np.testing.assert_allclose(result.values, [0.5, -0.5, -0.5, 0.5], atol=1e-12)


@pytest.mark.parametrize(("advantage", "value"), [("rloo", 2 / 3), ("maxrl", 1.0), ("grpo_loo", 2 / 3 * 3**0.5)])
def test_golden_values_of_other_group_advantages(advantage, value):
    """F3, MaxRL"""
    result = group_advantages([1, 0, 0, 1], [7] * 4, config(advantage=advantage))
    np.testing.assert_allclose(result.values, [value, -value, -value, value], atol=1e-9)


def test_leave_one_out_of_three():
    """B41: .5, -1, .5"""
    result = group_advantages([1, 0, 1], [3] * 3, config(advantage="rloo"))
    np.testing.assert_allclose(result.values, [0.5, -1, 0.5])


@pytest.mark.parametrize("advantage", ["reinforce_pp", "gae"])
def test_answers_that_are_not_compared_keep_their_reward_also_alone(advantage):
    result = group_advantages([1.0, None, 0.25], [1, 1, 2], config(advantage=advantage))
    assert result.values.tolist() == [1.0, 0.0, 0.25] and result.kept.tolist() == [True, False, True]


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(RewardError, match="maxrl"):
        group_advantages([1.0, -0.5], [1, 1], config(advantage="maxrl"))


REWARDS = np.array([1, 0, 0, 0, 1, 1, 1, 0.0])
GROUPS = np.array([5, 5, 5, 5, 2, 2, 2, 2])
EXPECTED = np.array([1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5])


@pytest.mark.parametrize(
    "order", [np.arange(8), np.array([0, 4, 1, 5, 2, 6, 3, 7]), np.random.default_rng(3).permutation(8)]
)
def test_advantages_follow_the_group_id_whatever_the_row_order(order):
    """B01"""
    result = group_advantages(REWARDS[order], GROUPS[order], config())
    np.testing.assert_allclose(result.values, EXPECTED[order], atol=1e-12)


def test_leaving_out_a_group_and_reordering_keeps_every_pair_together():
    """B39: rows are coded prompt*10+sample; prompt 2 has no signal, the rest is reordered by length."""
    codes = np.array([10, 11, 20, 21, 30, 31])
    rewards = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    lengths = np.array([3, 9, 4, 4, 1, 7])
    before = group_advantages(rewards, codes // 10, config(group_size=2))
    by_code = dict(zip(codes, before.values))
    chosen = np.flatnonzero(before.values != 0)
    chosen = chosen[np.argsort(-lengths[chosen])]
    after = group_advantages(rewards[chosen], codes[chosen] // 10, config(group_size=2))
    assert sorted(codes[chosen]) == [10, 11, 30, 31]
    assert {code: by_code[code] for code in codes[chosen]} == dict(zip(codes[chosen], after.values))


@pytest.mark.parametrize("advantage", ["grpo", "grpo_batch", "dr_grpo"])
@pytest.mark.parametrize("equal", [0.1, 0.0, 1.0])
def test_groups_of_equal_rewards_give_exactly_zero_and_are_counted(advantage, equal):
    """B02: in every scale mode, and with rewards whose mean is not exact in floating point."""
    rewards = [equal] * 4 + [0.0] * 4 + [1, 0, 0, 1]
    result = group_advantages(rewards, np.repeat([1, 2, 3], 4), config(advantage=advantage))
    assert (result.values[:8] == 0).all() and result.kept.all()
    assert (result.groups_without_signal, result.groups) == (2, 3)
    assert abs(result.values[8]) > 0.4


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_row_without_reward_is_left_out_and_counted_not_scored_zero(missing):
    """B05"""
    result = group_advantages([1, missing, 0, 0, 1, 0, 0, 0], GROUPS, config())
    np.testing.assert_allclose(result.values[[0, 2, 3]], [1.1547, -0.57735, -0.57735], atol=1e-5)
    np.testing.assert_allclose(result.values[4:], [1.5, -0.5, -0.5, -0.5])
    assert result.kept.tolist() == [True, False, True, True] + [True] * 4
    assert result.rows_without_reward == 1 and result.values[1] == 0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf")])
def test_an_infinite_reward_is_an_error_that_names_its_row(bad):
    """B05"""
    with pytest.raises(RewardError, match=r"row 2 \(group 5\)"):
        group_advantages([1, 0, bad, 0], [5] * 4, config())


def test_survivors_of_a_partial_group_are_compared_with_each_other():
    """B41"""
    result = group_advantages([1, 0, 1], [3, 3, 3], config())
    np.testing.assert_allclose(result.values, [0.57735, -1.1547, 0.57735], atol=1e-5)


def test_a_lone_survivor_is_dropped_and_counted_and_an_empty_group_too():
    """B41"""
    result = group_advantages([None, 1, None, None, None, None, None, None], GROUPS, config())
    assert not result.kept.any() and (result.values == 0).all()
    assert (result.groups_dropped, result.groups, result.rows_without_reward) == (2, 2, 7)


def test_with_groups_of_one_the_advantage_is_zero_and_the_row_stays():
    result = group_advantages([1.0, 0.0], [1, 2], config(group_size=1))
    assert result.values.tolist() == [0, 0] and result.kept.all()


def test_rewards_and_ids_of_different_length_are_refused():
    with pytest.raises(RewardError, match="3 rewards but 2 group ids"):
        group_advantages([1, 0, 1], [1, 1], config())


@pytest.mark.parametrize("advantage", ADVANTAGES)
@settings(max_examples=30, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(0, 8), min_size=2, max_size=6), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_groups_of_any_size_in_any_order_equal_sums_written_out(advantage, groups, seed):
    """B01, B02, B41"""
    ids = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
    rewards = np.concatenate(groups) / 8
    expected = np.concatenate([references.advantages(advantage, [r / 8 for r in g], 0.1) for g in groups])
    order = np.random.default_rng(seed).permutation(len(ids))
    found = group_advantages(rewards[order], ids[order], config(advantage=advantage, advantage_eps=0.1))
    np.testing.assert_allclose(found.values, expected[order], atol=1e-12)
