"""What the summary of a whole run says, for loops on virtual time whose right answer is known."""

import io

import pytest

from mindspeed_asyncflow.config.load import parse_config
from mindspeed_asyncflow.observe.summary import check_summary
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.simulation import clock
from mindspeed_asyncflow.simulation.run import NoSamples, Simulation, settled
from mindspeed_asyncflow.simulation.telling import SimMetrics, SimProgress
from mindspeed_asyncflow.workflow.recorder import StepRecorder

# A batch of answers takes 1 s and its training 1 s: both sides work all the time but at the beginning and the end.
SETTINGS = """
algorithm: {group_size: 2}
rollout: {replicas: 1, max_running: 512, max_new_tokens: 100}
data: {max_prompt_tokens: 28}
workload: {prompt_bins: [[28, 1]], answer_bins: [[100, 1]]}
trainer: {micro_batch_tokens: 100000}
workflow: {groups_per_step: 8, keep_versions: 4}
"""
COSTS = Costs(train_token_s=1 / 2048, prefill_token_s=0.0, decode_weights_s=0.01, decode_context_s=0.0)


def ended(steps, lag=1):
    """A simulation of so many steps that has ended, and its summary."""
    config = settled(parse_config(SETTINGS, [f"simulation.steps={steps}", f"workflow.max_lag={lag}"]), COSTS)

    async def main():
        simulation = Simulation(config, COSTS, SimMetrics(None), None)
        await simulation.go()
        return simulation, simulation.recorder.summary(simulation.run.window, simulation.sync, 9.0)

    simulation, summary = clock.run(main())
    check_summary(summary)
    return simulation, summary


@pytest.mark.parametrize(("steps", "lag"), [(12, 1), (12, 3)])
def test_the_last_steps_in_which_no_prompts_are_left_do_not_count_as_waiting(steps, lag):
    _, summary = ended(steps, lag)
    assert summary["rollout_idle_share"] == pytest.approx(0, abs=1e-3)
    first = 1 / (1 + steps - lag)  # the trainer waits for the answers of the first step
    assert summary["trainer_idle_share"] == pytest.approx(first, rel=1e-2)
    assert summary["bottleneck"] == f"balanced: trainer waits {first * 100:.0f} %, rollout waits 0 %"


def test_of_a_run_with_few_steps_nothing_is_said_to_hold_it_back():
    assert [bool(ended(steps)[1]["bottleneck"]) for steps in (1, 5, 9, 10)] == [False, False, False, True]


def test_a_run_no_longer_than_its_lag_has_the_shares_of_its_first_step():
    _, summary = ended(2, lag=3)
    assert summary["trainer_idle_share"] == pytest.approx(0.5, rel=1e-2)


def test_steps_of_processes_before_are_counted_apart_and_steps_made_again_by_this_one_are_not():
    simulation, summary = ended(3)
    assert (summary["steps"], summary["steps_before"]) == (3, 0)
    was, state = simulation.recorder, simulation.recorder.state()
    quiet = SimProgress(5, io.StringIO(), live=False)
    other = StepRecorder(simulation.config, SimMetrics(None), NoSamples(), quiet, str)
    for recorder, before in ((other, 3), (was, 0)):  # a new process, and one whose trainer alone came back
        recorder.restore(state)
        summary = recorder.summary(simulation.run.window, simulation.sync, 9.0)
        assert (summary["steps"], summary["steps_before"]) == (3, before)


def test_the_limit_of_the_difference_at_equal_weights_is_in_the_summary():
    _, summary = ended(1)
    assert (summary["dtype"], summary["rollout_train_logprob_gap_limit"]) == ("float32", 1e-3)
