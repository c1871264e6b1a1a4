import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_asyncflow.algorithms.gae import gae, returns_to_go, token_rewards


def test_the_reward_is_that_of_the_last_sampled_token_and_kl_is_taken_off_each():
    rewards = token_rewards(1.0, np.array([0.5, 9.0, -0.5, 9.0]), 0.1, np.array([1, 0, 1, 0]))
    np.testing.assert_allclose(rewards, [-0.05, 0, 1.05, 0])
    np.testing.assert_allclose(token_rewards(1.0, None, 0.1, np.zeros(3)), [0, 0, 0])


def test_returns_without_discount_are_the_reward_everywhere():
    """F4"""
    np.testing.assert_allclose(returns_to_go(np.array([0, 0, 2.0]), 1.0), [2, 2, 2])
    np.testing.assert_allclose(returns_to_go(np.array([0, 0, 2.0]), 0.5), [0.5, 1, 2])


def test_gae_by_hand():
    """F5: gamma 0.9, lambda 0.5"""
    advantages, returns = gae(np.array([0, 0, 1.0]), np.array([0.2, 0.4, 0.6]), np.ones(3), 0.9, 0.5)
    d2 = 1 - 0.6
    d1 = 0.9 * 0.6 - 0.4
    d0 = 0.9 * 0.4 - 0.2
    expected = [d0 + 0.45 * (d1 + 0.45 * d2), d1 + 0.45 * d2, d2]
    np.testing.assert_allclose(advantages, expected)
    np.testing.assert_allclose(returns, np.add(expected, [0.2, 0.4, 0.6]))


def test_with_gamma_and_lambda_one_the_advantage_is_the_return_less_the_value():
    values = np.array([0.3, -0.2, 0.9])
    advantages, returns = gae(np.array([0, 0, 1.0]), values, np.ones(3), 1.0, 1.0)
    np.testing.assert_allclose(returns, 1.0)
    np.testing.assert_allclose(advantages, 1 - values)


@given(
    mask=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    seed=st.integers(0, 2**32 - 1),
    gamma=st.floats(0.1, 1.0),
    lam=st.floats(0.0, 1.0),
)
def test_tokens_that_the_policy_did_not_sample_change_nothing(mask, seed, gamma, lam):
    """F5: the answer without them has the same advantages and returns."""
    rng = np.random.default_rng(seed)
    mask = np.array(mask)
    rewards, values = rng.normal(size=len(mask)) * mask, rng.normal(size=len(mask))
    kept = mask > 0
    found = gae(rewards, values, mask, gamma, lam)
    alone = gae(rewards[kept], values[kept], np.ones(kept.sum()), gamma, lam)
    for with_gaps, without in zip(found, alone):
        np.testing.assert_allclose(with_gaps[kept], without)
        assert (with_gaps[~kept] == 0).all()
    np.testing.assert_allclose(returns_to_go(rewards, gamma, mask)[kept], returns_to_go(rewards[kept], gamma))
    # the sum over all later differences, written out
    t = [i for i in range(len(mask)) if kept[i]]
    for n, i in enumerate(t):
        total = 0.0
        for m in range(n, len(t)):
            after = values[t[m + 1]] if m + 1 < len(t) else 0.0
            total += (gamma * lam) ** (m - n) * (rewards[t[m]] + gamma * after - values[t[m]])
        assert found[0][i] == pytest.approx(total, abs=1e-9)
