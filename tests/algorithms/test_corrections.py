import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.algorithms.corrections import bernoulli_kl, correct, proximal_logprobs
from mindspeed_asyncflow.algorithms.losses import Answers
from mindspeed_asyncflow.algorithms.policy_loss import make_policy_loss
from mindspeed_asyncflow.config.schema import AlgorithmConfig, CorrectionConfig
from tests.algorithms.cases import LENGTHS, LOG_PI, OLD_OVER_MU, micro_batch, on_tokens, tensor


def weights(cfg, gap=OLD_OVER_MU, lengths=LENGTHS, advantages=(1.0, -1.0), **others):
    """Weights [N] of tokens whose log(old / mu) is `gap`; pi is old."""
    rollout = torch.full_like(tensor(gap), -3.0)
    old = rollout + tensor(gap)
    index = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    found = correct(
        cfg,
        logprobs=old.clone().requires_grad_(),
        old=old,
        rollout=rollout,
        advantages=tensor(np.repeat(advantages, lengths)),
        answers=Answers(index, len(lengths)),
        **others,
    )
    return found.weight, found.metrics


def test_token_tis_golden_values():
    """F17, C = 2"""
    weight, metrics = weights(CorrectionConfig(weight="token", cap=2.0))
    torch.testing.assert_close(weight, tensor([1.051271, 0.406570, 2, 1, 0.904837, 2]), atol=1e-6, rtol=0)
    assert metrics["rollout_corr/weight_outside_sum"] == 2 and not weight.requires_grad


def test_token_masks_golden_values():
    """F18, 0.5 to 5"""
    weight, metrics = weights(CorrectionConfig(weight="token", floor=0.5, cap=5.0, beyond="zero"))
    torch.testing.assert_close(weight, tensor([1.051271, 0, 3.320117, 1, 0.904837, 0]), atol=1e-6, rtol=0)
    assert metrics["rollout_corr/masked_sum"] == 2


def test_sequence_mask_golden_values():
    """F18: product ratios 0.427415 and 22.197951; above 3 the answer is masked"""
    weight, _ = weights(CorrectionConfig(weight="sequence", cap=3.0, beyond="zero"))
    torch.testing.assert_close(weight, tensor([0.427415] * 2 + [0.0] * 4), atol=1e-6, rtol=0)
    whole, _ = weights(CorrectionConfig(weight="sequence", cap=100.0))
    torch.testing.assert_close(whole, tensor([0.427415] * 2 + [22.197951] * 4), atol=1e-6, rtol=0)


def test_geometric_golden_values():
    """F19"""
    weight, _ = weights(CorrectionConfig(weight="geometric", cap=100.0))
    torch.testing.assert_close(weight, tensor([0.653770] * 2 + [2.170592] * 4), atol=1e-6, rtol=0)
    masked, metrics = weights(CorrectionConfig(reject="geometric", reject_low=0.5, reject_high=2.0))
    assert masked.tolist() == [1, 1, 0, 0, 0, 0] and metrics["rollout_corr/rejected_sum"] == 4


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_rejected_token_or_answer_weighs_nothing_and_others_one(level):
    masked, _ = weights(CorrectionConfig(reject=level, reject_low=0.42, reject_high=2.0))
    expected = {"token": [1, 0, 0, 1, 1, 0], "sequence": [1, 1, 0, 0, 0, 0], "geometric": [1, 1, 0, 0, 0, 0]}
    assert masked.tolist() == expected[level]


def test_opsm_drops_only_bad_answers_that_the_policy_has_left():
    """F20: mean(log mu - log pi) = 0.475 for both"""
    gap = [-0.475, -0.475, -0.9, 0.0, -0.5, -0.5]
    masked, metrics = weights(CorrectionConfig(opsm_delta=0.4), gap)
    assert masked.tolist() == [1, 1, 0, 0, 0, 0] and metrics["rollout_corr/opsm_sum"] == 4
    assert weights(CorrectionConfig(opsm_delta=0.5), gap)[0].tolist() == [1] * 6


def test_kpop_masks_by_the_larger_bernoulli_divergence():
    """F22: both directions by hand"""
    p, q = tensor([0.9, 0.5, 0.01]), tensor([0.1, 0.5, 0.9])
    found = bernoulli_kl(p.log(), q.log())

    def kl(a, b):
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    expected = [max(kl(a, b), kl(b, a)) for a, b in zip(p.tolist(), q.tolist())]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert torch.isfinite(bernoulli_kl(tensor([0.0]), tensor([-50.0]))).all()


@pytest.mark.parametrize(
    ("tokens", "gap", "product", "mean"),
    [(300, math.log(0.7), 0.5, 0.7), (300, 0.005, 2.0, 1.005013), (100, 0.012, 2.0, 1.012072)],
)
def test_products_over_long_answers_are_bounded_in_log_space(tokens, gap, product, mean):
    """B18: 0.7^300 is 3.4e-47, 0 in float32; the raw weights are 4.4817 and 3.3201 for the other two."""
    for dtype in (torch.float32, torch.float64):
        rollout = torch.full((tokens,), -1.0, dtype=dtype)
        answers = Answers(torch.zeros(tokens, dtype=torch.int64), 1)
        for level, expected in (("sequence", product), ("geometric", mean)):
            found = correct(
                CorrectionConfig(weight=level, floor=0.5, cap=2.0),
                logprobs=rollout + gap,
                old=rollout + gap,
                rollout=rollout,
                advantages=torch.ones(tokens, dtype=dtype),
                answers=answers,
            )
            assert torch.isfinite(found.weight).all()
            assert found.weight[0].item() == pytest.approx(expected, rel=1e-4)
            raw = tokens * gap if level == "sequence" else gap
            assert found.metrics["rollout_corr/weight_log_raw_sum"].item() == pytest.approx(raw * tokens, rel=1e-3)


def test_decoupled_ppo_golden_values():
    """F21: log mu, old, pi = -1.2, -1.0, -0.9 and A = 1: weight 1.221403, ratio 1.105171, loss -1.349859"""
    lags = torch.tensor([6.0], dtype=torch.float64)
    old = proximal_logprobs("log_linear", tensor([0.0]), tensor([-6.0]), lags)
    assert old.item() == pytest.approx(-6 + 6 * 5 / 6, abs=1e-9)  # versions 4, 9 and 10
    # a lag of 3 puts old two thirds of the way from mu to pi, as in the golden row
    batch = micro_batch([1], [1.0], np.array([-1.2]))
    batch = type(batch)(**{**{f: getattr(batch, f) for f in batch.__slots__}, "lags": np.array([3.0, 0.0])})
    logprobs = on_tokens(batch, [-0.9]).requires_grad_()
    cfg = AlgorithmConfig(proximal="log_linear", clip_low=0.2, clip_high=0.2)
    loss, _ = make_policy_loss(cfg, CorrectionConfig(weight="token", cap=10.0))(logprobs, logprobs.detach(), batch)
    assert loss.item() == pytest.approx(-1.349859, abs=1e-6)


def test_the_proximal_policy_of_fresh_tokens_is_the_policy_itself():
    pi, mu = tensor([-0.9, -0.9, -0.9]).requires_grad_(), tensor([-1.2, -1.2, -1.2])
    old = proximal_logprobs("log_linear", pi, mu, torch.tensor([0.0, 1.0, 2.0]))
    torch.testing.assert_close(old, tensor([-0.9, -1.2, -1.05]))
    assert not old.requires_grad
    assert proximal_logprobs("rollout", pi, mu, None) is mu
    torch.testing.assert_close(proximal_logprobs("current", pi, mu, None), pi.detach())


def test_stale_tokens_weigh_one_over_their_lag():
    lags = tensor([0, 1, 2, 4, 8, 1])
    weight, _ = weights(CorrectionConfig(stale_power=1.0), lags=lags)
    assert weight.tolist() == [1, 1, 0.5, 0.25, 0.125, 1]


@pytest.mark.parametrize("rejected", ["count", "leave_out"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_denominators_count_rejected_tokens_only_where_asked_to(rejected, mode):
    rollout = np.array(LOG_PI) - np.array(OLD_OVER_MU)
    batch = micro_batch(LENGTHS, [1, -1], rollout)
    cfg = AlgorithmConfig(proximal="current", aggregation=mode)
    how = CorrectionConfig(reject="sequence", reject_low=0.1, reject_high=2.0, rejected=rejected)
    logprobs = on_tokens(batch, LOG_PI).requires_grad_()
    loss, parts = make_policy_loss(cfg, how)(logprobs, logprobs.detach(), batch)
    loss.backward()
    left_out = rejected == "leave_out"
    assert parts["actor/loss_tokens_count"] == (2 if left_out else 6)
    assert parts["actor/loss_sequences_count"] == (1 if left_out else 2)
    assert parts["actor/tokens_count"] == 6
    assert (logprobs.grad[batch.sample_index == 1] == 0).all() and loss.item() == pytest.approx(
        -2.0 if mode == "token-mean" else -1.0
    )


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    weight=st.sampled_from(["off", "token", "sequence", "geometric"]),
    reject=st.sampled_from(["off", "token", "sequence", "geometric", "kpop"]),
    opsm=st.sampled_from([None, 0.1]),
    power=st.sampled_from([0.0, 1.0]),
)
def test_corrections_do_not_depend_on_the_cut(seed, weight, reject, opsm, power):
    """Loss, gradient and parts of two answers together are the sums of each alone."""
    rng = np.random.default_rng(seed)
    lengths = [3, 5]
    pi, rollout = -rng.random(8) - 0.01, -rng.random(8) - 0.01
    lags = rng.integers(0, 4, 8)
    cfg = AlgorithmConfig(proximal="current", loss="gspo")
    how = CorrectionConfig(weight=weight, cap=1.5, reject=reject, reject_high=1.3, opsm_delta=opsm, stale_power=power)

    def run(part):
        batch = micro_batch(lengths, [1.0, -1.0], rollout, order=part)
        where = np.concatenate([np.arange(0, 3) if i == 0 else np.arange(3, 8) for i in part])
        of_all = np.zeros(len(batch.input_ids))
        of_all[batch.loss_mask > 0] = lags[where]
        batch = type(batch)(**{**{f: getattr(batch, f) for f in batch.__slots__}, "lags": of_all})
        logprobs = on_tokens(batch, pi[where]).requires_grad_()
        loss, parts = make_policy_loss(cfg, how)(logprobs, logprobs.detach(), batch)
        loss.backward()
        return loss.item(), logprobs.grad[batch.loss_mask > 0].numpy(), {k: float(v) for k, v in parts.items()}

    whole, first, second = run([0, 1]), run([0]), run([1])
    assert whole[0] == pytest.approx(first[0] + second[0], abs=1e-9)
    np.testing.assert_allclose(whole[1], np.concatenate([first[1], second[1]]), atol=1e-9)
    for key, value in whole[2].items():
        if key.endswith(("_sum", "_count")):
            assert value == pytest.approx(first[2][key] + second[2][key], abs=1e-6)
