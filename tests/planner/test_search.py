"""The search finds what an exhaustive one finds, and says why it left out the rest."""

from __future__ import annotations

import dataclasses
import random

import pytest

from mindspeed_asyncflow.config import Config, parse_config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.analytic import analytic_costs
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.estimate import estimate
from mindspeed_asyncflow.planner.search import Plan, search
from mindspeed_asyncflow.planner.workload import Workload
from mindspeed_asyncflow.simulation.run import simulate
from tests.planner.models import QWEN_7B, SMALL, configuration, work


@dataclasses.dataclass(frozen=True)
class Told:
    step_s: float
    idle: dict[str, float]


def expected(config: Config, costs: Costs) -> Told:
    """Stands in for the simulator: the expectation itself."""
    found = estimate(config, costs, Workload.of(config))
    return Told(found.step_s, found.idle)


def plan(config: Config, model=SMALL, simulator=expected, **how) -> Plan:
    found = work(model)
    return search(config, found, lambda c: analytic_costs(c, found), simulator, devices=config.cluster.devices, **how)


def test_bounds_leave_out_candidates_but_never_the_best():
    config = configuration("cluster.devices=3", "workflow.groups_per_step=64", "algorithm.group_size=16")
    whole, pruned = plan(config, prune=False), plan(config)
    assert pruned.best.step_s == whole.best.step_s
    assert pruned.simulated < whole.simulated
    left_out = sum(n for reason, n in pruned.rejected.items() if reason.startswith("slower bound"))
    assert left_out == whole.simulated - pruned.simulated


def test_few_runs_are_spent_on_many_splits_and_the_rest_is_counted():
    config = configuration("cluster.devices=16", "workflow.groups_per_step=32")
    found = plan(config, QWEN_7B, most=6)
    assert found.simulated == 6
    assert found.rejected["not simulated"] > 0
    splits = {found.best.split, *(other.split for other in found.others)}
    assert len(splits) >= 3


def test_others_are_slower_and_the_best_of_other_splits_come_first():
    config = configuration("cluster.devices=16", "workflow.groups_per_step=32")
    found = plan(config, QWEN_7B, most=20)
    assert all(other.step_s >= found.best.step_s * 0.99 for other in found.others)
    first = [other.split for other in found.others[:3]]
    assert len({found.best.split, *first}) == 4


def test_faster_training_moves_devices_to_rollout():
    sizes = []
    for tflops in (50, 2000):
        config = configuration("cluster.devices=16", "workflow.groups_per_step=64", f"cluster.tflops={tflops}")
        sizes.append(plan(config, QWEN_7B, most=40).best.config.trainer.world_size)
    assert sizes[1] < sizes[0]


def test_nothing_that_fits_is_an_error_with_reasons():
    with pytest.raises(ConfigError, match=r"nothing fits 2 devices .* by memory"):
        plan(configuration("cluster.devices=2", "cluster.memory_gb=8"), QWEN_7B)


def small_grid(seed: int) -> Config:
    """A cluster of a few devices with random speeds, memory, lengths, lag and batch."""
    draw = random.Random(seed).choice
    lag, mean = draw([0, 1, 2]), draw([64, 256, 1024])
    return parse_config(
        f"""
model: {{dtype: bfloat16}}
data: {{max_prompt_tokens: 128}}
rollout: {{max_new_tokens: {mean * 4}}}
algorithm: {{group_size: {draw([4, 8])}}}
workflow: {{groups_per_step: {draw([4, 8])}, max_lag: {lag}, update: {draw(["delayed", "in_flight"])}}}
workload: {{answer_mean: {mean}, answer_p95: {mean * draw([1.5, 2.5, 3.5])}, prompt_mean: 60, prompt_p95: 100}}
cluster: {{devices: {draw([2, 3, 4])}, devices_per_node: {draw([2, 4])}, memory_gb: {draw([4, 6, 8])},
  tflops: {draw([5, 40, 300])}, memory_gbs: {draw([100, 1000])}, network_gbs: {draw([1, 10])}}}
simulation: {{steps: {6 + 2 * lag}, seed: {seed}}}
"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 9, 10, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 4, 11))])
def test_on_small_grids_the_simulated_optimum_is_always_found(seed):
    config = small_grid(seed)
    runs: dict[str, object] = {}

    def once(candidate: Config, costs: Costs):
        key = candidate.model_dump_json()
        if key not in runs:
            runs[key] = simulate(candidate, costs)
        return runs[key]

    whole = plan(config, simulator=once, prune=False)
    pruned = plan(config, simulator=once)
    fastest = [min(r.step_s for r in (found.best, *found.others)) for found in (whole, pruned)]
    assert fastest[0] == fastest[1]
