import pytest

from mindspeed_asyncflow.config.load import parse_config
from mindspeed_asyncflow.errors import ConfigError, WorkerLost
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.simulation.faults import Fault, parse
from mindspeed_asyncflow.simulation.run import simulate

BASE = """
cluster: {devices_per_node: 1}
algorithm: {group_size: 2}
rollout: {engine: simulated, replicas: 2, max_running: 16, max_new_tokens: 100}
data: {max_prompt_tokens: 28}
workload: {prompt_bins: [[28, 1]], answer_bins: [[100, 1]]}
trainer: {micro_batch_tokens: 100000}
workflow: {groups_per_step: 32, max_lag: 1}
simulation: {steps: 8}
"""
COSTS = Costs(
    prefill_token_s=0, decode_weights_s=0.01, decode_context_s=0, train_token_s=1e-6, fetch_s=0.01, load_s=0.01
)


def run(*faults, more=()):
    config = parse_config(BASE, [f"simulation.faults=[{', '.join(faults)}]", *more])
    return simulate(config, COSTS)


def test_forms_of_faults():
    assert parse(["slow:1:3", "slow:1:3:5", "die:0:2.5", "unscored:0.1"], 2) == [
        Fault("slow", 1, 0.0, 3.0),
        Fault("slow", 1, 5.0, 3.0),
        Fault("die", 0, 2.5),
        Fault("unscored", amount=0.1),
    ]


@pytest.mark.parametrize("text", ["burn:1:2", "slow:1", "slow:1:0", "die:2:1", "die:0.5:1", "join:x:1", "unscored:2"])
def test_a_wrong_fault_is_named(text):
    with pytest.raises(ConfigError, match=f"simulation.faults: '{text}'"):
        parse([text], 2)


def test_two_replicas_are_twice_as_fast_as_one():
    assert run(more=["rollout.replicas=1"]).step_s == pytest.approx(2 * run().step_s, rel=0.05)


@pytest.mark.parametrize("fault", ["die:1:3", "leave:1:3"])
def test_a_replica_that_goes_changes_speed_and_loses_nothing(fault):
    result = run(fault)
    assert (result.trained, result.open, result.violations) == (8 * 64, 0, {})
    assert result.step_times_s[-1] > 1.7 * run().step_times_s[-1]


def test_a_replica_that_joins_late_makes_the_run_faster_from_then_on():
    result = run("join:1:6")
    assert result.trained == 8 * 64
    assert result.step_times_s[-1] < 0.7 * result.step_times_s[1]


@pytest.mark.slow
def test_a_slow_replica_answers_less_and_holds_nobody_up_for_ever():
    result = run("slow:1:4", more=["workflow.max_lag=2"])
    assert result.trained == 8 * 64
    assert run().step_s < result.step_s < run(more=["rollout.replicas=1"]).step_s * 1.05


def test_a_run_without_replicas_ends_with_the_name_of_the_last_one():
    with pytest.raises(WorkerLost, match=r"no rollout replica is left.*rollout[01] died"):
        run("die:0:2", "die:1:3")


def test_answers_without_a_score_are_dropped_and_counted():
    result = run("unscored:0.3")
    assert 0.2 * 512 < result.dropped["unscored"] < 0.4 * 512
    assert result.issued == result.trained + result.dropped["unscored"]
    assert result.violations == {}
