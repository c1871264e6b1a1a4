import itertools

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.algorithms.kl import k2, k3, k3_plus, kl_loss, kl_values
from mindspeed_asyncflow.errors import ConfigError
from tests.algorithms.cases import tensor


def test_golden_values_of_the_estimators():
    """F14"""
    d = tensor([0.5, -0.5, 1.0])
    zero = torch.zeros_like(d)
    torch.testing.assert_close(k2(d, zero), tensor([0.125, 0.125, 0.5]), atol=1e-6, rtol=0)
    torch.testing.assert_close(k3(d, zero), tensor([0.106531, 0.148721, 0.367879]), atol=1e-6, rtol=0)


def test_k1_is_refused_as_a_loss_because_its_gradient_ignores_the_reference():
    """B12"""
    with pytest.raises(ConfigError, match="k1 cannot be a loss"):
        kl_loss("k1")


def test_estimates_in_the_reward_are_the_same_numbers_without_a_gradient():
    """F14"""
    d = np.array([0.5, -0.5, 1.0])
    assert kl_values("k1", d, np.zeros(3)).tolist() == d.tolist()
    for name, estimate in (("k2", k2), ("k3", k3)):
        np.testing.assert_allclose(
            kl_values(name, d, np.zeros(3)), estimate(tensor(d), tensor(np.zeros(3))), atol=1e-12
        )
    with pytest.raises(ConfigError, match="k3\\+"):
        kl_values("k3+", d, d)


def test_k3_plus_reads_as_k3_and_pulls_as_k2():
    logprobs = tensor([-1.0, -3.0]).requires_grad_()
    value = k3_plus(logprobs, tensor([-2.0, -1.0]))
    value.sum().backward()
    torch.testing.assert_close(value, k3(logprobs, tensor([-2.0, -1.0])))
    torch.testing.assert_close(logprobs.grad, tensor([1.0, -2.0]))


def test_k3_is_finite_and_pulls_the_right_way_everywhere():
    """B13: float32; x = ref - logp."""
    x = torch.tensor([-2, -0.5, 0, 0.5, 3, 30, 90])
    logprobs = (-x).requires_grad_()
    value = k3(logprobs, torch.zeros(7))
    value.sum().backward()
    torch.testing.assert_close(value[:5], torch.tensor([1.13534, 0.10653, 0, 0.14872, 16.0855]), atol=1e-4, rtol=0)
    assert torch.isfinite(value).all() and torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[3].item() == pytest.approx(-0.64872, abs=1e-4)
    assert (logprobs.grad[3:] < 0).all() and (logprobs.grad[:2] > 0).all()


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_minimising_the_term_moves_the_policy_onto_the_reference(name):
    """B11: 200 SGD steps on a 3-way softmax; the true KL falls all the way."""
    reference = torch.log_softmax(tensor([2.0, 0.0, -1.0]), 0)
    logits = tensor([-1.0, 1.0, 0.5]).requires_grad_()
    estimate, history = kl_loss(name), []
    for _ in range(200):
        logprobs = torch.log_softmax(logits, 0)
        history.append((logprobs.exp() * (logprobs - reference)).sum().item())
        loss = (logprobs.exp().detach() * estimate(logprobs, reference)).sum()  # expectation over the policy's samples
        (gradient,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= 0.2 * gradient
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(history))
    assert history[-1] < 1e-3
