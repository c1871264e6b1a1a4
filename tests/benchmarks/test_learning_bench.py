"""The learning benchmark: the lag is exact, rules are what they say, and settings that count as equal are equal."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import learning
import learning_jobs as jobs
import learning_report as report

CONFIG = Path(__file__).parents[2] / "configs" / "qwen_tiny_cpu.yaml"


def follow(steps, lag):
    """(version that sampled, version that trained) of each step, and the order of samplings and steps."""
    log = []

    def make(version):
        log.append(("sample", version))
        return version

    trained = []
    for step, version in jobs.lagged(make, steps, lag):
        trained.append((step, version))
        log.append(("train", step))
    return trained, log


@pytest.mark.parametrize("lag", [0, 1, 4, 8])
def test_each_step_trains_what_was_sampled_exactly_lag_versions_before(lag):
    trained, log = follow(12, lag)
    assert trained == [(step, max(0, step - lag)) for step in range(12)]
    # a batch of version v is sampled when v steps have been made, neither earlier nor later
    for place, (what, version) in enumerate(log):
        if what == "sample":
            assert sum(other == "train" for other, _ in log[:place]) == version
    assert sum(what == "sample" for what, _ in log) == 12


def test_a_run_shorter_than_its_lag_samples_no_batch_that_is_not_trained():
    trained, log = follow(3, 8)
    assert trained == [(0, 0), (1, 0), (2, 0)]
    assert sum(what == "sample" for what, _ in log) == 3


@pytest.mark.parametrize(
    ("first", "last", "heldout", "expected"),
    [
        (0.2, 0.9, (0.3, 0.9), True),
        (0.2, 0.9, (0.9, 0.9), False),  # greedy answers are no better
        (0.5, 0.5 + 1.9 * (0.25 / 32) ** 0.5, (0.3, 0.9), False),  # inside two standard errors
        (0.5, 0.5 + 2.1 * (0.25 / 32) ** 0.5, (0.3, 0.9), True),
        (0.0, 0.04, (0.3, 0.9), False),  # no noise, but too little
        (0.9, 0.2, (0.3, 0.9), False),
    ],
)
def test_a_run_improved_if_its_rise_exceeds_noise_and_held_out_answers_agree(first, last, heldout, expected):
    assert report.improved([first] * 50 + [last] * 10, heldout) is expected


def test_the_last_line_is_the_mean_over_seeds_at_lag_four_relative_to_lag_zero():
    planned = jobs.correction_jobs(2, 60)
    level = {0: 0.8, 1: 0.8, 2: 0.7, 4: 0.6, 8: 0.5}

    def scores(job):
        good = job.name == "GSPO" and job.lag == 4
        return [0.0] * 50 + [(0.78 if good else level[job.lag]) + (0.01 if job.seed == 1 else -0.01)] * 10

    results = {job.key: {"scores": scores(job), "heldout": [0.1, 0.9], "seconds": 1.0} for job in planned}
    found = report.last_line([], planned, results)
    assert found["best_correction"] == "GSPO"
    assert found["eta4_over_eta0_with_correction"] == 0.975
    assert found["eta4_over_eta0_without"] == found["eta4_over_eta0_ppo_clip"] == 0.75
    assert {row["correction"] for row in found["table"]} == set(jobs.CORRECTIONS)
    assert all(row["lag8"] == 0.625 for row in found["table"])


def test_algorithms_are_counted_run_by_run():
    planned = jobs.algorithm_jobs(2, 60, ["sort4", "sort5"], ["GRPO", "PPO"])

    def result(job):
        better = (job.task, job.name, job.seed) != ("sort5", "PPO", 2)
        return {"scores": [0.2] * 50 + [0.8 if better else 0.2] * 10, "heldout": [0.3, 0.9], "seconds": 1.0}

    found = report.last_line(planned, [], {job.key: result(job) for job in planned})
    assert (found["improved"], found["improved_of"]) == (7, 8)


def gradient(settings, drift):
    """Of the configured loss by the log-probabilities of three answers, whose rollout policy is `drift` away."""
    import torch

    from mindspeed_asyncflow.algorithms.aggregate import loss_denominator
    from mindspeed_asyncflow.algorithms.policy_loss import make_policy_loss
    from mindspeed_asyncflow.config.load import load_config
    from tests.algorithms.cases import micro_batch, on_tokens

    config = load_config(CONFIG, settings)
    now = np.array([-0.5, -1.0, -2.5, -0.2, -2.0, -0.7, -0.1, -1.1, -0.4])
    gaps = drift * np.array([0.9, -0.9, 0.5, 1.2, 0.4, 0.3, 1.2, -0.15, -0.12])  # log pi - log mu
    batch = micro_batch([3, 4, 2], [1.0, -0.5, -0.75], now - gaps)
    object.__setattr__(batch, "lags", np.full(len(batch.input_ids), 4.0 if drift else 0.0))
    logprobs = on_tokens(batch, now.tolist()).requires_grad_()
    total, parts = make_policy_loss(config.algorithm, config.correction)(logprobs, logprobs.detach(), batch)
    a = config.algorithm
    counts = (float(parts[f"actor/loss_{what}_count"]) for what in ("tokens", "sequences"))
    (total / loss_denominator(a.aggregation, *counts, a.loss_horizon)).backward()
    return logprobs.grad[torch.from_numpy(batch.loss_mask > 0)].numpy()


def test_without_lag_all_compared_settings_take_the_same_step():
    """What lets one run stand for all of them at lag 0."""
    plain = gradient([], 0.0)
    assert np.abs(plain).min() > 0.05
    for settings in jobs.CORRECTIONS.values():
        np.testing.assert_allclose(gradient(settings, 0.0), plain, atol=1e-12)


def test_with_lag_all_compared_settings_differ_and_token_tis_is_the_recomputed_decoupled_loss():
    found = {name: gradient(settings, 1.0) for name, settings in jobs.CORRECTIONS.items()}
    names = list(found)
    for i, name in enumerate(names):
        for other in names[:i]:
            assert np.abs(found[name] - found[other]).max() > 1e-3, (name, other)
    tis = next(value for name, value in found.items() if name.startswith("token TIS"))
    np.testing.assert_allclose(gradient([*jobs.REINFORCE, "correction.weight=token"], 1.0), tis, atol=1e-12)


def test_finished_runs_are_kept_and_not_repeated(tmp_path, monkeypatch):
    planned = jobs.algorithm_jobs(1, 6, ["sort4"], ["GRPO"])
    result = {"scores": [0.2] * 6, "heldout": [0.3, 0.4], "seconds": 1.0}
    learning.keep(tmp_path, planned[0], result)
    monkeypatch.setattr(learning, "ProcessPoolExecutor", None)  # nothing may be started
    assert learning.run_all(planned, tmp_path, 2)[planned[0].key].items() >= result.items()
    other = jobs.algorithm_jobs(2, 6, ["sort4"], ["GRPO"])[1]
    assert learning.kept(tmp_path, other) is None


@pytest.mark.slow
def test_a_small_run_of_each_kind_trains_and_is_repeatable():
    """GRPO with a lag twice, PPO with its critic, and DAPO with replaced groups; beside this process, whose torch a
    trainer would change."""
    small = ["trainer.steps=4", "trainer.lr_warmup_steps=0", "workflow.groups_per_step=8", "evaluation.prompts=200"]
    settings = [small, small, *([*jobs.ALGORITHMS[name], *small] for name in ("PPO", "DAPO"))]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        first, again, *others = pool.map(learning.work, settings, (2, 2, 1, 1), (1, 1, 1, 1))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert len(first["scores"]) == 4
    for found in others:
        assert all(0 <= score <= 1 for score in found["scores"])
        assert found["heldout"][0] == first["heldout"][0] != found["heldout"][1]
