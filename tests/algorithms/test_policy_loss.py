import numpy as np
import pytest
import torch

from mindspeed_asyncflow.algorithms.aggregate import loss_denominator
from mindspeed_asyncflow.algorithms.policy_loss import make_policy_loss
from mindspeed_asyncflow.config.schema import AlgorithmConfig, CorrectionConfig
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.observe.metrics import merge_parts, reduce_sums
from tests.algorithms.cases import LENGTHS, LOG_PI, LOG_RATIO, OLD_OVER_MU, micro_batch, on_tokens, tensor

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]
TIS = CorrectionConfig(weight="token", cap=2.0)


def config(**changes):
    return AlgorithmConfig(**{"clip_low": 0.2, "clip_high": 0.2, "loss_horizon": 4, **changes})


def run(cfg, batch, flat_logprobs, fill=0.0, correction=None):
    """(loss sum, gradient at the trained tokens, metric parts as floats)"""
    logprobs = on_tokens(batch, flat_logprobs, fill).requires_grad_()
    entropy = on_tokens(batch, np.arange(len(flat_logprobs), dtype=float), fill)
    loss, parts = make_policy_loss(cfg, correction)(logprobs, entropy, batch)
    loss.backward()
    assert (logprobs.grad[batch.loss_mask == 0] == 0).all()
    return loss.item(), logprobs.grad[batch.loss_mask > 0], {key: float(value) for key, value in parts.items()}


def aggregate(cfg, parts):
    """The number that parts of a whole batch come to."""
    counted = parts["actor/loss_tokens_count"], parts["actor/loss_sequences_count"]
    return parts["actor/loss_sum"] / loss_denominator(cfg.aggregation, *counted, cfg.loss_horizon)


def base_batch(**changes):
    rollout = np.array(LOG_PI) - np.array(LOG_RATIO)
    return micro_batch(LENGTHS, [1, -1], changes.pop("rollout", rollout), **changes)


def test_the_golden_case_and_its_metrics():
    """F6, F8 token-mean"""
    loss, _, parts = run(config(), base_batch(), LOG_PI)
    assert loss == pytest.approx(2.277228, abs=1e-6)
    values = reduce_sums([parts])
    assert aggregate(config(), parts) == pytest.approx(0.379538, abs=1e-6)
    assert values["actor/pg_loss"] == pytest.approx(0.379538, abs=1e-6)
    assert values["actor/pg_clipfrac"] == values["actor/pg_clipfrac_low"] == pytest.approx(1 / 6)
    assert values["actor/ppo_kl"] == pytest.approx(0.025, abs=1e-6)
    assert values["actor/tokens_count"] == 6 and values["actor/entropy"] == 2.5
    assert values["actor/ratio_max"] == pytest.approx(np.exp(0.3)) and values["actor/ratio_min"] == pytest.approx(
        np.exp(-0.4)
    )


def test_mismatch_metrics_golden_values():
    """mismatch row: here the trainer's policy is `old`"""
    rollout = np.array(LOG_PI) - np.array(OLD_OVER_MU)
    _, _, parts = run(config(proximal="current"), base_batch(rollout=rollout), LOG_PI, correction=TIS)
    values = reduce_sums([parts])
    assert values["rollout_corr/kl"] == pytest.approx(-0.375, abs=1e-6)
    assert values["rollout_corr/k3_kl"] == pytest.approx(0.970309, abs=1e-6)
    assert values["rollout_corr/is_eff_sample_size"] == pytest.approx(0.814742, abs=1e-6)
    assert values["rollout_corr/is_clipfrac"] == pytest.approx(2 / 6)
    assert values["rollout_corr/abs_diff_max"] == pytest.approx(2.0)


def test_token_tis_weighs_loss_and_gradient_and_carries_no_gradient_of_its_own():
    """F17"""
    rollout = np.array(LOG_PI) - np.array(OLD_OVER_MU)
    weight = np.array([1.051271, 0.406570, 2, 1, 0.904837, 2])
    advantages = np.array([1, 1, -1, -1, -1, -1])
    for cfg in (config(proximal="current"), config(loss="reinforce")):
        _, gradient, _ = run(cfg, base_batch(rollout=rollout), LOG_PI, correction=TIS)
        np.testing.assert_allclose(gradient, -weight * advantages, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(mode, kl_coef):
    """B06: any micro-batch size, any order, samples with other prompt lengths."""
    rng = np.random.default_rng(0)
    lengths = [2, 6, 1, 5, 3]
    tokens = sum(lengths)
    advantages, logprobs = rng.normal(size=5), -rng.random(tokens) * 2
    rollout, ref = logprobs + rng.normal(size=tokens) * 0.5, logprobs + rng.normal(size=tokens)
    cfg = config(aggregation=mode, kl_coef=kl_coef, dual_clip=3.0)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    results = []
    for cuts in ([[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[4, 0], [2, 3, 1]]):
        total, gradient, parts = 0.0, np.zeros(tokens), []
        for part in cuts:
            batch = micro_batch(lengths, advantages, rollout, ref=ref, order=part, prompt=1 + len(cuts))
            where = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in part])
            loss, grad, metrics = run(cfg, batch, logprobs[where], fill=float("nan"))
            total += loss
            gradient[where] += grad.numpy()
            parts.append(metrics)
        results.append((total / loss_denominator(mode, tokens, 5, 4), gradient, merge_parts(parts)))
    for total, gradient, metrics in results[1:]:
        assert total == pytest.approx(results[0][0], abs=1e-6)
        np.testing.assert_allclose(gradient, results[0][1], atol=1e-6)
        # `entropy` of the test counts up inside each part, so it differs on purpose
        same = {key: value for key, value in results[0][2].items() if "entropy" not in key}
        assert {key: metrics[key] for key in same} == pytest.approx(same, abs=1e-5)
        assert aggregate(cfg, metrics) == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize("cuts", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_token_mean_of_known_losses(cuts):
    """B06: 2 tokens of loss 1 and 6 of loss 3 are 2.5 in every cut, never 2.0."""
    rollout = -np.ones(8)
    total = sum(
        run(config(), micro_batch([2, 6], [-1, -3], rollout, order=part), -np.ones(sum([2, 6][i] for i in part)))[0]
        for part in cuts
    )
    assert total / loss_denominator("token-mean", 8, 2) == pytest.approx(2.5)


def test_masked_answers_count_neither_above_nor_below():
    """B09"""
    masks = [1] * 4 + [0] * 12
    batch = micro_batch([4, 12], [-0.5, -9.0], -np.ones(16), masks=masks)
    loss, _, parts = run(config(), batch, -np.ones(4), fill=float("-inf"))
    assert loss / loss_denominator("token-mean", parts["actor/tokens_count"], 1) == pytest.approx(0.5)
    per_answer = config(aggregation="seq-mean-token-mean")
    assert aggregate(per_answer, run(per_answer, batch, -np.ones(4))[2]) == pytest.approx(0.5)


@pytest.mark.parametrize("mode", MODES)
def test_with_everything_masked_loss_and_gradient_are_zero(mode):
    """B09: even where the masked positions hold -inf and NaN."""
    batch = micro_batch([4, 12], [1, 1], -np.ones(16), masks=np.zeros(16), ref=-np.ones(16))
    logprobs = torch.full((18,), float("-inf"), dtype=torch.float64)
    logprobs[::2] = float("nan")
    logprobs.requires_grad_()
    loss, parts = make_policy_loss(config(aggregation=mode, kl_coef=0.1))(logprobs, logprobs.detach(), batch)
    loss.backward()
    assert loss.item() == 0 and (logprobs.grad == 0).all()
    assert parts["actor/tokens_count"] == parts["actor/loss_tokens_count"] == parts["actor/loss_sequences_count"] == 0


def test_kl_is_added_to_the_loss_and_averaged_over_real_tokens():
    """B11, B12: one token, logp -1, ref -2, coefficient 0.1, no advantage; then beside two masked slots."""
    for masks in ([1], [1, 1, 0, 0]):
        count = len(masks)
        batch = micro_batch([count], [0.0], -np.ones(count), masks=masks, ref=-2 * np.ones(count))
        _, _, parts = run(config(kl_coef=0.1), batch, -np.ones(sum(masks)))
        values = reduce_sums([parts])
        assert aggregate(config(), parts) == pytest.approx(0.036788, abs=1e-6)
        assert values["actor/kl_loss"] == pytest.approx(0.36788, abs=1e-5)


def test_groups_without_signal_feel_only_the_kl_term():
    """B02: advantage 0 gives no gradient without a reference, and the pull of the reference with one."""
    batch = micro_batch([2, 2], [0.0, 1.0], -np.ones(4), ref=-2 * np.ones(4))
    _, without, _ = run(config(), batch, -np.ones(4))
    assert without[:2].tolist() == [0, 0] and (without[2:] != 0).all()
    _, with_kl, _ = run(config(kl_coef=0.1), batch, -np.ones(4))
    np.testing.assert_allclose(with_kl[:2], 0.1 * (1 - np.exp(-1)), atol=1e-6)


def test_a_missing_reference_is_an_error_not_a_missing_term():
    with pytest.raises(ConfigError, match="kl_coef"):
        run(config(kl_coef=0.1), base_batch(), LOG_PI)


def test_every_token_of_the_engine_counts_also_an_eos_valued_one():
    """B28: the mask comes from what was sampled, so a final EOS has gradient; nothing here looks at token ids."""
    batch = micro_batch([3], [1.0], -np.ones(3))
    _, gradient, _ = run(config(), batch, -np.ones(3))
    assert (gradient != 0).all()


def test_on_policy_ratio_is_exactly_one():
    _, gradient, parts = run(config(), base_batch(rollout=np.array(LOG_PI)), LOG_PI)
    assert parts["actor/ratio_min"] == parts["actor/ratio_max"] == 1.0
    assert parts["actor/ppo_kl_sum"] == 0.0
    assert gradient.tolist() == tensor([-1, -1, 1, 1, 1, 1]).tolist()
