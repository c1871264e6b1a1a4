"""Log-probabilities from logits: values, gradients, temperature, padded vocabulary, and the cut over two ranks."""

import numpy as np
import pytest
import rank_cases
import torch

from mindspeed_asyncflow.engines.megatron.logprobs import token_logprobs


def of_one_row(row, target, dtype=torch.float32, **options):
    logprob, _ = token_logprobs(torch.tensor([row], dtype=dtype), torch.tensor([target]), **options)
    return float(logprob[0])


def test_temperature_divides_the_logits_once():
    """B22: neither the raw value nor the divided log-probability."""
    assert of_one_row([2.0, 1.0, 0.0], 0, temperature=0.5) == pytest.approx(-0.14293, abs=1e-5)
    assert of_one_row([2.0, 1.0, 0.0], 0) == pytest.approx(-0.40761, abs=1e-5)


def test_close_logits_stay_apart_in_fp32():
    """B25: [20, 19.9375, 0, 0]; bf16 inputs are widened before the softmax."""
    row = [20.0, 19.9375, 0.0, 0.0]
    for dtype in (torch.float32, torch.bfloat16):  # both values are exact in bf16 up to rounding of 19.9375
        first, second = (of_one_row(row, t, dtype) for t in (0, 1))
        if dtype is torch.float32:
            assert (first, second) == (pytest.approx(-0.66239, abs=1e-5), pytest.approx(-0.72489, abs=1e-5))
        wide = torch.tensor(row, dtype=dtype).float().log_softmax(-1)
        assert (first, second) == (pytest.approx(float(wide[0]), abs=1e-6), pytest.approx(float(wide[1]), abs=1e-6))


def test_values_entropy_and_gradient_match_autograd():
    torch.manual_seed(0)
    logits = torch.randn(7, 11, requires_grad=True)
    targets, weights = torch.randint(0, 11, (7,)), torch.randn(7)
    logprob, entropy = token_logprobs(logits, targets, temperature=0.7)
    (logprob * weights).sum().backward()
    mine, logits.grad = logits.grad, None
    wanted = (logits / 0.7).log_softmax(-1)
    (wanted.gather(1, targets[:, None]).squeeze(1) * weights).sum().backward()
    torch.testing.assert_close(logprob, wanted.gather(1, targets[:, None]).squeeze(1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, -(wanted.exp() * wanted).sum(-1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mine, logits.grad, atol=1e-6, rtol=1e-6)
    assert not entropy.requires_grad


def test_logits_are_left_as_they_were():
    logits = torch.randn(3, 5, requires_grad=True)
    before = logits.detach().clone()
    logprob, _ = token_logprobs(logits, torch.tensor([0, 1, 2]), temperature=0.5, vocab_size=4)
    logprob.sum().backward()
    assert torch.equal(logits.detach(), before)


def test_padded_vocabulary_rows_have_no_weight():
    torch.manual_seed(1)
    logits = torch.randn(4, 8)
    logits[:, 6:] = 50.0  # would win if they counted
    padded = logits.clone().requires_grad_()
    targets = torch.tensor([0, 3, 5, 2])
    logprob, entropy = token_logprobs(padded, targets, vocab_size=6)
    wanted, wanted_entropy = token_logprobs(logits[:, :6], targets)
    torch.testing.assert_close((logprob, entropy), (wanted, wanted_entropy))
    logprob.sum().backward()
    assert torch.equal(padded.grad[:, 6:], torch.zeros(4, 2))


def test_large_logits_do_not_overflow():
    assert of_one_row([1e4, 0.0, -1e4], 0) == 0.0
    assert of_one_row([1e4, 0.0, -1e4], 2) == -2e4


def test_no_rows_is_allowed():
    logits = torch.zeros(0, 5, requires_grad=True)
    logprob, entropy = token_logprobs(logits, torch.zeros(0, dtype=torch.int64))
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()


@pytest.mark.slow
def test_padding_of_many_rows_over_two_ranks_weighs_nothing(groups):
    """B71: 1003 tokens in 1024 rows, 512 on each rank; padding rows at +50, all other logits 0."""
    logits, targets = np.zeros((4, 1024), np.float32), np.array([0, 511, 512, 1002])
    logits[:, 1003:] = 50.0
    for part in groups.of(2).run(rank_cases.tensor_parallel_logprobs, logits=logits, targets=targets, size=1003):
        assert np.allclose(part["logprob"], -6.91075, atol=1e-5)
        assert np.allclose(part["entropy"], 6.91075, atol=1e-5)
        assert part["grad"].shape == (4, 512)
    assert not part["grad"][:, 491:].any() and part["grad"][:, :491].all()


@pytest.mark.slow
def test_two_ranks_with_half_the_vocabulary_each_agree_with_one(groups):
    rng = np.random.default_rng(2)
    logits, targets = rng.normal(size=(6, 10)).astype(np.float32), np.array([0, 4, 5, 8, 2, 7])
    first, second = groups.of(2).run(rank_cases.tensor_parallel_logprobs, logits=logits, targets=targets, size=9)
    whole = torch.from_numpy(logits).requires_grad_()
    logprob, entropy = token_logprobs(whole, torch.from_numpy(targets), temperature=0.7, vocab_size=9)
    (logprob * torch.arange(1.0, 7.0)).sum().backward()
    for part in (first, second):
        assert np.allclose(part["logprob"], logprob.detach(), atol=1e-6)
        assert np.allclose(part["entropy"], entropy, atol=1e-6)
    assert np.allclose(np.concatenate([first["grad"], second["grad"]], axis=1), whole.grad, atol=1e-6)
