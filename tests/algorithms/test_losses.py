import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.algorithms.losses import LOSSES, Answers, Tokens, ppo_clip, registered_loss, reinforce
from mindspeed_asyncflow.config.schema import AlgorithmConfig
from mindspeed_asyncflow.errors import ConfigError
from tests.algorithms import references
from tests.algorithms.cases import ADVANTAGES, LENGTHS, LOG_PI, LOG_RATIO, tensor

EQUAL = AlgorithmConfig(clip_low=0.2, clip_high=0.2)


def context(logprobs, old, advantages):
    """Every token an answer of its own."""
    return Tokens(logprobs, old, advantages, Answers(torch.arange(len(old)), len(old)))


def loss_of(log_ratio, advantages, cfg=EQUAL):
    old = torch.full_like(tensor(log_ratio), -1.0)
    return ppo_clip(context(old + tensor(log_ratio), old, tensor(advantages)), cfg)


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
    ppo_clip(context(logprobs, tensor([0.0] * 3), tensor([1.0, 1.0, -1.0])), EQUAL).loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor([0, -1.105171, 0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_huge_ratio_stays_finite_in_value_and_gradient(dtype):
    """B13"""
    logprobs = torch.tensor([90.0, 500.0], dtype=dtype, requires_grad=True)
    loss = ppo_clip(context(logprobs, torch.zeros(2, dtype=dtype), -torch.ones(2, dtype=dtype)), EQUAL).loss
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad > 0).all()  # still pushed down


def test_reinforce_is_the_advantage_times_the_log_probability():
    logprobs = tensor([-0.5, -1.0]).requires_grad_()
    result = reinforce(context(logprobs, tensor([-0.7, -1.0]), tensor([2.0, -1.0])), EQUAL)
    result.loss.sum().backward()
    assert result.loss.tolist() == [1.0, -1.0] and logprobs.grad.tolist() == [-2.0, 1.0]


def test_an_unknown_loss_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="ppo_clip, gspo"):
        registered_loss("ppo")


def golden(loss, **changes):
    """(token losses [6], aggregated by token-mean, by seq-mean-token-mean) of the base case."""
    cfg = AlgorithmConfig(loss=loss, **{"clip_low": 0.2, "clip_high": 0.2, **changes})
    logprobs = tensor(LOG_PI)
    old = logprobs - tensor(LOG_RATIO)
    answers = Answers(torch.tensor([0, 0, 1, 1, 1, 1]), 2)
    advantages = tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    loss = registered_loss(loss)(Tokens(logprobs, old, advantages, answers), cfg).loss
    return loss, loss.mean().item(), answers.mean(loss).mean().item()


@pytest.mark.parametrize("loss", ["gspo", "gspo_token"])
def test_gspo_golden_values(loss):
    """F9"""
    tokens, token_mean, answer_mean = golden(loss, clip_low=3e-4, clip_high=4e-4)
    torch.testing.assert_close(tokens[[0, 2]], tensor([-0.951229, 0.9997]), atol=1e-6, rtol=0)
    assert answer_mean == pytest.approx(0.024235, abs=1e-6) and token_mean == pytest.approx(0.349390, abs=1e-6)


@pytest.mark.parametrize("bound, expected", [(0.2, 0.043491), (0.4, 0.018174)])
def test_gmpo_golden_values(bound, expected):
    """F10"""
    assert golden("gmpo", clip_low=bound, clip_high=bound)[2] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("low, high, expected", [(0.2, 0.2, -0.255635), (1.0, 4.0, -0.245501), (1.0, 0.272, -0.242906)])
def test_cispo_golden_values(low, high, expected):
    """F11: bounds 0.8 to 1.2; a cap of 5 or 1.272 alone."""
    assert golden("cispo", clip_low=low, clip_high=high)[1] == pytest.approx(expected, abs=1e-6)


def test_sapo_golden_value():
    """F12"""
    assert golden("sapo")[2] == pytest.approx(-0.019843, abs=1e-6)


def test_dppo_masks_tokens_whose_probability_moved_too_far_where_the_advantage_wants_it():
    """F13"""
    cfg = AlgorithmConfig(loss="dppo_tv", clip_low=0.2, clip_high=0.2, dppo_cap=20.0)
    p, old = tensor([0.8, 0.8, 0.2, 0.2, 0.55]), tensor([0.5, 0.5, 0.5, 0.5, 0.5])
    logprobs = p.log().requires_grad_()
    result = registered_loss("dppo_tv")(context(logprobs, old.log(), tensor([1.0, -1.0, 1.0, -1.0, 1.0])), cfg)
    assert result.clipped.tolist() == [True, False, False, True, False]
    result.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor([0, 1.6, -0.4, 0, -1.1]), atol=1e-9, rtol=0)
    capped = AlgorithmConfig(loss="dppo_tv", clip_low=1.0, clip_high=1.0, dppo_cap=1.5)
    loss = registered_loss("dppo_tv")(context(p.log(), old.log(), tensor([1.0] * 5)), capped).loss
    torch.testing.assert_close(loss[0], -1.5 * p[0].log())


def test_gspo_and_its_token_form_have_the_same_gradient_where_all_advantages_of_an_answer_are_equal():
    gradients = []
    for name in ("gspo", "gspo_token"):
        logprobs = tensor(LOG_PI).requires_grad_()
        answers = Answers(torch.tensor([0, 0, 1, 1, 1, 1]), 2)
        advantages = tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
        old = tensor(LOG_PI) - 0.5 * tensor(LOG_RATIO)
        cfg = AlgorithmConfig(loss=name, clip_low=0.2, clip_high=0.2)
        answers.mean(registered_loss(name)(Tokens(logprobs, old, advantages, answers), cfg).loss).sum().backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_every_loss_equals_a_reference_written_token_by_token(name, seed, lengths):
    """Values and gradients, answers without a token among them; gradients of the reference by central differences."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    logprobs, old = -rng.random(count) * 3 - 0.01, -rng.random(count) * 3 - 0.01
    advantages = np.repeat(rng.normal(size=len(lengths)), lengths)
    cfg = AlgorithmConfig(loss=name, clip_low=0.3, clip_high=0.4, dual_clip=3.0 if name == "ppo_clip" else None)
    variable = tensor(logprobs).requires_grad_()
    index = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    found = LOSSES[name](Tokens(variable, tensor(old), tensor(advantages), Answers(index, len(lengths))), cfg).loss
    expected = references.loss(name, logprobs, logprobs, old, advantages, lengths, cfg)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-10)
    if not count:
        return
    found.sum().backward()

    def total(at):
        return sum(references.loss(name, at, logprobs, old, advantages, lengths, cfg))

    for i in range(count):
        step = np.zeros(count)
        step[i] = 1e-6
        slope = (total(logprobs + step) - total(logprobs - step)) / 2e-6
        assert variable.grad[i].item() == pytest.approx(slope, abs=1e-5)
