"""Runs whose right answer is known: two stages, constant lengths, no noise."""

import io
import re

import numpy as np
import pytest

from mindspeed_asyncflow.config.load import parse_config
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.simulation.compare import words
from mindspeed_asyncflow.simulation.run import simulate
from mindspeed_asyncflow.simulation.schedules import NAMED, named, random_schedule
from mindspeed_asyncflow.simulation.telling import SimProgress

# Every answer has 100 tokens, a decoding step takes 0.01 s: a batch of answers takes 1 s, whatever its size.
BASE = """
algorithm: {group_size: 2}
rollout: {replicas: 1, max_running: 512, max_new_tokens: 100}
data: {max_prompt_tokens: 28}
workload: {prompt_bins: [[28, 1]], answer_bins: [[100, 1]]}
trainer: {micro_batch_tokens: 100000}
simulation: {steps: 8, skip_steps: 2}
"""
GENERATE_S = 1.0
TOKENS = 128


def costs(train_s=1.0, groups=8, **more):
    """`train_s` for a whole step of `groups` groups of 2."""
    settings = {"prefill_token_s": 0.0, "decode_weights_s": 0.01, "decode_context_s": 0.0}
    return Costs(train_token_s=train_s / (groups * 2 * TOKENS), **(settings | more))


def run(train_s=1.0, settings=(), groups=8, **more):
    config = parse_config(BASE, [f"workflow.groups_per_step={groups}", *settings])
    return simulate(config, costs(train_s, groups, **more))


def test_one_task_at_a_time_takes_the_sum_of_all():
    result = run(
        settings=["workflow.max_lag=0", "workflow.overlap=false"], optimizer_s=0.25, publish_s=0.1, load_s=0.05
    )
    assert result.step_s == pytest.approx(GENERATE_S + 1.0 + 0.25 + 0.1 + 0.05, rel=1e-3)


def test_with_lag_one_equal_stages_run_side_by_side_and_the_trainer_never_waits():
    result = run(settings=["workflow.max_lag=1"])
    assert result.step_s == pytest.approx(1.0, rel=1e-3)
    assert result.idle["trainer"] == pytest.approx(0.0, abs=1e-3)
    assert result.idle["rollout"] == pytest.approx(0.0, abs=1e-3)


def test_streamed_stages_end_one_piece_after_the_longer_one():
    # 16 groups, one at a time on 1 slot pair: the trainer follows in chunks of 4 groups while the next are generated.
    settings = ["workflow.max_lag=0", "rollout.max_running=2", "trainer.stream_groups=4"]
    result = run(train_s=16.0, settings=settings, groups=16)
    assert result.step_s == pytest.approx(16.0 + 16.0 / 4, rel=1e-3)  # the longest stage, and the last chunk
    sequential = run(train_s=16.0, settings=[*settings, "workflow.overlap=false"], groups=16)
    assert sequential.step_s == pytest.approx(32.0, rel=1e-3)


@pytest.mark.parametrize("update", ["delayed", "in_flight"])
def test_the_longer_stage_sets_the_step_when_they_overlap(update):
    settings = ["workflow.max_lag=1", f"workflow.update={update}"]
    assert run(train_s=2.0, settings=settings).step_s == pytest.approx(2.0, rel=1e-2)
    assert run(train_s=0.5, settings=settings).step_s == pytest.approx(1.0, rel=1e-2)


def test_versions_of_the_delayed_update_are_0_0_1_2():
    assert run(settings=["workflow.max_lag=1"]).oldest_by_step == [0, 0, 1, 2, 3, 4, 5, 6]


def test_lag_is_bounded_and_tight():
    for lag in (0, 1, 3):
        result = run(train_s=2.0, settings=[f"workflow.max_lag={lag}", "workflow.keep_versions=4"])
        assert result.max_lag == lag
        assert result.violations == {}


@pytest.mark.parametrize("transfer_s", [0.0, 0.3, 0.9])
def test_an_update_costs_the_replica_its_load_whatever_the_transfer_takes(transfer_s):
    # Training is the shorter stage, so that the version is there before the replica needs it.
    more = {"load_s": 0.02, "publish_s": transfer_s / 2, "fetch_s": transfer_s / 2}
    result = run(0.05, ["workflow.max_lag=1", "cluster.devices_per_node=1"], **more)
    assert result.step_s == pytest.approx(GENERATE_S + 0.02, rel=1e-3)
    assert result.rollout_exposed_share == pytest.approx(0.02 / 1.02, rel=1e-2)
    assert result.idle["rollout"] == pytest.approx(0.0, abs=1e-3)


def test_rolling_replicas_load_one_after_another():
    settings = ["workflow.max_lag=1", "rollout.replicas=4", "workflow.update=rolling"]
    result = run(settings=settings, load_s=0.1)
    assert result.violations == {}
    assert result.step_s < GENERATE_S + 4 * 0.1


def test_colocated_takes_turns():
    result = run(settings=["workflow.schedule=colocated", "workflow.max_lag=0"], give_s=0.2, take_s=0.3, publish_s=9.0)
    assert result.step_s == pytest.approx(GENERATE_S + 1.0 + 0.2 + 0.3, rel=1e-2)
    assert result.turns == result.steps


def simulated(result):
    return {name: value for name, value in result.to_dict().items() if name != "real_s"}


def test_the_same_seed_gives_the_same_run():
    config, price = random_schedule(np.random.default_rng(3), 3)
    first, second = simulate(config, price), simulate(config, price)
    assert simulated(first) == simulated(second)


def test_another_seed_gives_other_lengths():
    config, price = random_schedule(np.random.default_rng(3), 3)
    other = config.model_copy(update={"simulation": config.simulation.model_copy(update={"seed": 4})})
    assert simulated(simulate(config, price)) != simulated(simulate(other, price))


def test_throughput_counts_prompts_and_answers_of_trained_samples():
    result = run(settings=["workflow.max_lag=1"])
    assert result.tokens_per_s == pytest.approx(16 * TOKENS / result.step_s)
    assert result.tokens_per_s_per_device == pytest.approx(result.tokens_per_s / 16)
    assert result.label == "simulated, not run on NPUs"


class Told:
    """In place of a `MetricsWriter`."""

    def __init__(self):
        self.steps = []

    def write(self, step, metrics):
        self.steps.append(metrics)


def told(settings=(), **more):
    """Result, metrics of each step and lines of a run."""
    config, steps, lines = parse_config(BASE, ["workflow.groups_per_step=8", *settings]), Told(), io.StringIO()
    progress = SimProgress(config.simulation.steps, lines, live=False)
    result = simulate(config, costs(**more), metrics=steps, progress=progress)
    return result, steps.steps, lines.getvalue().splitlines()


@pytest.mark.parametrize("settings", [["workflow.max_lag=1"], ["workflow.max_lag=3", "workflow.keep_versions=4"]])
def test_the_lags_of_the_metrics_are_those_of_the_result(settings):
    result, steps, lines = told(settings)
    worst = sum(lag * rows for lag, rows in result.lag_histogram.items())
    assert sum(m["staleness/worst_mean"] * m["samples_count"] for m in steps) == pytest.approx(worst)
    assert max(m["staleness/worst_max"] for m in steps) == result.max_lag
    assert {m["samples/masked"] for m in steps} == {0}
    assert [f"lag {m['staleness/worst_max']:.0f} " in line for m, line in zip(steps, lines)] == [True] * 8


def test_what_is_not_simulated_is_neither_written_nor_shown():
    _, steps, lines = told()
    names = {name for metrics in steps for name in metrics}
    assert [n for n in names if n.startswith(("reward/", "score/", "actor/grad", "actor/lr", "actor/loss/"))] == []
    assert {"timing_s/step", "staleness/worst_max", "idle/trainer", "perf/tokens_per_s"} <= names
    assert not re.search(r"reward|loss|grad", " ".join(lines))


def test_a_step_line_shows_simulated_seconds():
    result, _, lines = told(train_s=600.0)
    assert result.real_s < 60
    assert lines[0].startswith("step 1/8  10 min 01 s simulated") and lines[-1].startswith(
        "step 8/8  1 h 20 min simulated"
    )


def test_words_call_a_single_measured_step_the_last_one():
    one, more = (words(run(settings=[f"simulation.steps={n}"]))[1] for n in (3, 4))
    assert one == "3 steps, the last one took 1.0 s"
    assert more == "4 steps, 1.0 s each after the first 2"


@pytest.mark.slow
def test_every_named_schedule_runs_on_the_same_workload():
    config = parse_config(BASE, ["workflow.groups_per_step=8", "cluster.devices=4", "rollout.replicas=2"])
    trained = {
        name: simulate(named(config, name), costs(load_s=0.05, give_s=0.1, take_s=0.1)).trained for name in NAMED
    }
    assert set(trained.values()) == {8 * 16}


@pytest.mark.parametrize("seed", range(12))
def test_the_law_holds_under_random_schedules_and_faults(seed):
    config, price = random_schedule(np.random.default_rng(seed), seed)
    result = simulate(config, price)
    assert result.violations == {}
    assert result.steps == config.simulation.steps
    assert result.max_lag <= config.workflow.max_lag


@pytest.mark.slow
def test_the_law_holds_under_many_random_schedules_and_faults():
    for seed in range(1000, 1400):
        config, price = random_schedule(np.random.default_rng(seed), seed)
        result = simulate(config, price)
        assert result.violations == {}, seed
        assert result.steps == config.simulation.steps, seed


@pytest.mark.parametrize("seed", [1057, 1285])
def test_a_replica_that_leaves_among_its_answers_strands_no_group(seed):
    """Its batch ends in the very moment at which its loop is told to end; answers there cannot be interrupted."""
    config, price = random_schedule(np.random.default_rng(seed), seed)
    assert any(fault.startswith("leave") for fault in config.simulation.faults)
    assert simulate(config, price).steps == config.simulation.steps
