"""Expected and least step times, against sums token by token and against simulated runs."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.estimate import (
    estimate,
    generation_s,
    least_of_rollout,
    least_of_trainer,
    step_bound_s,
)
from mindspeed_asyncflow.planner.workload import Lengths, Workload
from mindspeed_asyncflow.simulation.run import simulate
from tests.planner.models import PLAIN, configuration

LINEAR = Costs(
    prefill_token_s=1e-5,
    decode_weights_s=1e-2,
    decode_context_s=1e-7,
    decode_row_s=1e-4,
    train_token_s=1e-4,
    optimizer_s=0.5,
    publish_s=0.3,
    load_s=0.2,
)
SHORT = ["workflow.groups_per_step=8", "algorithm.group_size=4", "rollout.max_running=64", "simulation.steps=8"]


def token_by_token(costs: Costs, prompts: np.ndarray, answers: np.ndarray, slots: int) -> float:
    """One decoding step after the other, answers admitted in order."""
    waiting, running, seconds = list(zip(prompts.tolist(), answers.tolist())), [], 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            prompt, answer = waiting.pop(0)
            seconds += costs.prefill_token_s * prompt
            running.append([prompt, answer])
        seconds += costs.decode_s(float(len(running)), float(sum(c for c, _ in running)))
        running = [[context + 1, left - 1] for context, left in running if left > 1]
    return seconds


@pytest.mark.parametrize(("samples", "slots", "tolerance"), [(8, 8, 0.04), (1, 4, 0.06), (24, 8, 0.12)])
def test_the_expected_generation_is_the_mean_over_draws(samples, slots, tolerance):
    answer = Lengths.of_bins([(5, 2), (20, 5), (60, 2), (150, 1)], 1000)
    workload = Workload(Lengths.of_bins([(30, 1)], 100), answer, samples, 1)
    rng = np.random.default_rng(1)
    prompts = np.full(samples, 30)
    drawn = [token_by_token(LINEAR, prompts, answer.sample(rng, samples), slots) for _ in range(150)]
    assert generation_s(LINEAR, workload, samples, slots) == pytest.approx(np.mean(drawn), rel=tolerance)


SCHEDULES = [
    ["workflow.max_lag=0", "workflow.overlap=false"],
    ["workflow.max_lag=0"],
    ["workflow.max_lag=1"],
    ["workflow.max_lag=2", "workflow.update=in_flight", "workflow.lanes=2"],
    ["workflow.max_lag=1", "rollout.replicas=3"],
    ["workflow.schedule=colocated", "workflow.max_lag=0"],
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=" ".join)
@pytest.mark.parametrize("trains_slowly", [False, True])
def test_no_simulated_run_is_faster_than_its_bound(schedule, trains_slowly):
    config = configuration(*SHORT, *schedule)
    costs = LINEAR.scaled(train=30.0) if trains_slowly else LINEAR
    # Every length is the same, so that expectation and draw agree.
    config = config.model_copy(
        update={
            "workload": config.workload.model_copy(update={"prompt_bins": [(50, 1.0)], "answer_bins": [(200, 1.0)]})
        }
    )
    workload = Workload.of(config)
    bound = step_bound_s(config, least_of_trainer(config, costs, workload), least_of_rollout(config, costs, workload))
    simulated = simulate(config, costs)
    assert bound <= simulated.step_s * (1 + 1e-6)
    assert bound > 0.4 * simulated.step_s  # and says something


def test_what_limits_a_step_is_named():
    config = configuration(*SHORT, "workflow.max_lag=4")
    workload = Workload.of(config)
    assert estimate(config, PLAIN.scaled(train=100.0), workload).limit == "training"
    slow = estimate(config, PLAIN.scaled(rollout=100.0), workload)
    assert slow.limit == "generation" and slow.idle["trainer"] > 0.9
    waiting = estimate(config, PLAIN.scaled(transfer=0.0), workload)
    late = Costs(**PLAIN.to_dict() | {"publish_s": 10 * waiting.step_s})
    assert "max_lag" in estimate(config, late, workload).limit
