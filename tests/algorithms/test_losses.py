import pytest
import torch

from mindspeed_asyncflow.algorithms.losses import ppo_clip, registered_loss, reinforce, truncated_weight
from mindspeed_asyncflow.config.schema import AlgorithmConfig
from mindspeed_asyncflow.errors import ConfigError
from tests.algorithms.cases import ADVANTAGES, LENGTHS, LOG_RATIO, OLD_OVER_MU, tensor

EQUAL = AlgorithmConfig(clip_low=0.2, clip_high=0.2)


def loss_of(log_ratio, advantages, cfg=EQUAL):
    old = torch.full_like(tensor(log_ratio), -1.0)
    return ppo_clip(old + tensor(log_ratio), old, tensor(advantages), cfg)


def test_ppo_clip_golden_values():
    """F6"""
    result = loss_of(LOG_RATIO, [1.0] * LENGTHS[0] + [ADVANTAGES[1]] * LENGTHS[1])
    expected = tensor([-1.105171, -0.818731, 1.349859, 1.0, 0.8, 1.051271])
    torch.testing.assert_close(result.loss, expected, atol=1e-6, rtol=0)
    assert result.clipped.tolist() == [False, False, False, False, True, False]  # clipfrac 1/6


@pytest.mark.parametrize("clip_high, expected", [(0.2, -1.2), (0.28, -1.246077)])
def test_clip_higher_lets_good_tokens_rise_further(clip_high, expected):
    """F6"""
    result = loss_of([0.22], [1.0], AlgorithmConfig(clip_low=0.2, clip_high=clip_high))
    torch.testing.assert_close(result.loss, tensor([expected]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dual_clip, expected", [(3.0, 3.0), (None, 4.481689)])
def test_dual_clip_bounds_the_loss_of_bad_tokens(dual_clip, expected):
    """F7"""
    result = loss_of([1.5], [-1.0], AlgorithmConfig(clip_low=0.2, clip_high=0.2, dual_clip=dual_clip))
    torch.testing.assert_close(result.loss, tensor([expected]), atol=1e-6, rtol=0)
    assert result.clipped_lower.tolist() == [dual_clip is not None]


@pytest.mark.parametrize("dual_clip, first", [(3.0, 3.0), (None, 10.0)])
def test_dual_clip_leaves_positive_advantages_alone(dual_clip, first):
    """B15"""
    ratio = tensor([10, 10, 0.5, 0.5, 1])
    cfg = AlgorithmConfig(clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)
    result = loss_of(ratio.log().tolist(), [-1, 1, -1, 1, 1], cfg)
    torch.testing.assert_close(result.loss, tensor([first, -1.2, 0.8, -0.5, -1.0]), atol=1e-6, rtol=0)


def test_clipped_tokens_have_no_gradient_and_others_that_of_the_ratio():
    logprobs = tensor([0.5, 0.1, -0.5]).requires_grad_()
    ppo_clip(logprobs, tensor([0.0] * 3), tensor([1.0, 1.0, -1.0]), EQUAL).loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor([0, -1.105171, 0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_huge_ratio_stays_finite_in_value_and_gradient(dtype):
    """B13"""
    logprobs = torch.tensor([90.0, 500.0], dtype=dtype, requires_grad=True)
    loss = ppo_clip(logprobs, torch.zeros(2, dtype=dtype), -torch.ones(2, dtype=dtype), EQUAL).loss
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad > 0).all()  # still pushed down


def test_reinforce_is_the_advantage_times_the_log_probability():
    logprobs = tensor([-0.5, -1.0]).requires_grad_()
    result = reinforce(logprobs, tensor([-0.7, -1.0]), tensor([2.0, -1.0]), EQUAL)
    result.loss.sum().backward()
    assert result.loss.tolist() == [1.0, -1.0] and logprobs.grad.tolist() == [-2.0, 1.0]


def test_truncated_importance_weights():
    """F17, C=2"""
    mu = tensor([-3.0] * 6)
    old = (mu + tensor(OLD_OVER_MU)).requires_grad_()
    weight = truncated_weight(old, mu, 2.0)
    expected = tensor([1.051271, 0.406570, 2, 1, 0.904837, 2])
    torch.testing.assert_close(weight, expected, atol=1e-6, rtol=0)
    assert not weight.requires_grad


def test_an_unknown_loss_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="ppo_clip, reinforce"):
        registered_loss("ppo")
