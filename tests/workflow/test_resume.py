"""Runs that are cut at a checkpoint and go on: the real loops over fake engines."""

import time

import numpy as np
import pytest

from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.workflow.staleness import StalenessWindow
from tests.workflow.fakes import FakePool, FakeRollout, FakeTrain, prompts_of, run_loops
from tests.workflow.partial_engine import CountingBackend
from tests.workflow.test_run import config, metrics_of

TIMES = ("timing_s/", "perf/", "idle/", "time", "weight_sync/publish", "weight_sync/load_s", "dock/")


def computed(rows):
    """Metrics without what a clock says, and how full a dock is, which may have another size."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def trained(out, first):
    """(group, member), versions and rewards of everything trained from step `first` on, in order."""
    told = [note for note in out.notes.of("trained") if note["step"] >= first]
    return [
        (note["step"], [(note["groups"][r], note["versions"][r], note["rewards"][r]) for r in rows_of(note)])
        for note in told
    ]


def rows_of(note):
    return [row for replica in note["plan"] for batch in replica for row in batch]


def samples(out, first):
    files = sorted(out.folder.samples.iterdir())
    return {f.name: f.read_text() for f in files if int(f.stem.split("_")[1]) >= first}


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("replicas, pairs", [(2, 1), (2, 2)])
def test_lag_0_resumed_at_any_step_repeats_every_bit(tmp_path, at, replicas, pairs):
    settings = config(max_lag=0, replicas=2, trainer={"save_every": 1})
    whole = run_loops(settings, tmp_path / "whole", prompts_of(10, 4))
    rest = run_loops(settings, tmp_path / "rest", prompts_of(10, 4), resume=whole.saved[at], pairs=pairs)
    assert trained(rest, 0) == trained(whole, at) and len(trained(rest, 0)) > 0
    assert computed(metrics_of(tmp_path / "rest")) == computed(metrics_of(tmp_path / "whole"))[at:]
    assert samples(rest, 0) == samples(whole, at) and samples(rest, 0)
    assert rest.run.window.state() == whole.run.window.state()
    last = [out.saved[6].state for out in (whole, rest)]
    for state in last:
        for clock in ("last_step_s", "times", "loop_s"):
            del state["recorder"][clock]
    assert last[0] == last[1]


class LongAnswers(CountingBackend):
    """A token of every answer each millisecond."""

    def step(self):
        time.sleep(0.001)
        return super().step()

    def score(self, sequences):
        return [np.full(len(answer), -float(self.version), np.float32) for _, answer in sequences]


def long_answers():
    return SteppedEngine("rollout", LongAnswers, start_timeout_s=5.0, command_timeout_s=5.0)


def everything_trained(first, rest, at):
    """(epoch, prompt) of all groups that a run trained: until its cut, and after it by whoever went on."""
    prompts = {}
    for out in (rest, first):
        for note in out.notes.of("issued"):
            prompts.update(zip(note["groups"], map(tuple, note["prompts"])))
    for group, _, epoch, index, _ in first.saved[at].state["book"]["groups"]:
        prompts[group] = (epoch, index)
    groups = [
        group
        for out, chosen in ((first, range(at)), (rest, range(at, 10**6)))
        for note in out.notes.of("trained")
        if note["step"] in chosen
        for group in dict.fromkeys(g for g, _ in note["groups"].values())
    ]
    return [prompts[g] for g in groups]


@pytest.mark.parametrize("pairs", [1, 3])
@pytest.mark.parametrize("at", [1, 2, 5, 7])
def test_with_lag_and_partial_answers_nothing_is_lost_nor_trained_twice(tmp_path, at, pairs):
    workflow = {"partial_rounds": 4, "max_lag": 2}
    settings = config(
        steps=8, max_lag=2, replicas=2, trainer={"save_every": 1}, workflow=workflow, rollout={"max_new_tokens": 12}
    )
    whole = run_loops(
        settings, tmp_path / "whole", prompts_of(32, 4, epochs=1), rollouts=[long_answers(), long_answers()]
    )
    cut = whole.saved[at]
    rest = run_loops(
        settings,
        tmp_path / "rest",
        prompts_of(32, 4, epochs=1),
        rollouts=[long_answers(), long_answers()],
        resume=cut,
        pairs=pairs,
    )
    assert sorted(everything_trained(whole, rest, at)) == [(0, i) for i in range(32)]
    window = rest.run.window
    assert (window.issued, window.trained, window.open) == (64, 64, 0) and rest.dock_used_bytes == 0
    assert max(rest.recorder.lags) <= 2 and sum(rest.recorder.lags.values()) == 64
    assert [row["step"] for row in metrics_of(tmp_path / "rest")] == list(range(at, 8))


def test_answers_that_are_complete_in_the_cut_are_trained_and_not_asked_again(tmp_path):
    """B50: prompts 0 to 7, two per step, one step ahead; the cut comes after the first step."""
    settings = config(steps=4, groups=2, trainer={"save_every": 1})
    slow = FakeTrain(delay_s=0.05)
    whole = run_loops(settings, tmp_path / "whole", prompts_of(8, 2, epochs=1), train=slow)
    cut = whole.saved[1]
    assert {2, 3} <= {index for *_, index, _ in cut.state["book"]["groups"]}
    answers = sum(len(np.load(file)["i.response_ids"]) for file in cut.dock.glob("*.npz"))
    engine = FakeRollout()
    rest = run_loops(settings, tmp_path / "rest", prompts_of(8, 2, epochs=1), rollouts=[engine], resume=cut)
    assert sorted(everything_trained(whole, rest, 1)[2:4]) == [(0, 2), (0, 3)]
    assert sorted(everything_trained(whole, rest, 1)) == [(0, i) for i in range(8)]
    assert answers >= 1 and engine.answered == 16 - 4 - answers  # of 16, step 0 trained 4


@pytest.mark.parametrize("at, further", [(5, 7), (6, 6), (7, 5)])
def test_a_cut_at_the_end_of_an_epoch_goes_on_with_the_next_one(tmp_path, at, further):
    """B59: 6 steps per epoch, 2 epochs."""
    settings = config(steps=100, trainer={"save_every": 1})
    whole = run_loops(settings, tmp_path / "whole", prompts_of(24, 4, epochs=2))
    assert max(whole.saved) == 12
    rest = run_loops(settings, tmp_path / "rest", prompts_of(24, 4, epochs=2), resume=whole.saved[at])
    assert len(metrics_of(tmp_path / "rest")) == further
    expected = [(epoch, i) for epoch in range(2) for i in range(24)]
    assert sorted(everything_trained(whole, rest, at)) == expected


def test_at_the_end_of_the_data_nothing_more_is_trained(tmp_path):
    settings = config(steps=100, trainer={"save_every": 1})
    whole = run_loops(settings, tmp_path / "whole", prompts_of(8, 4, epochs=1))
    rest = run_loops(settings, tmp_path / "rest", prompts_of(8, 4, epochs=1), resume=whole.saved[2])
    assert rest.notes.of("trained") == [] and rest.run.window.version == 2


def test_the_budget_of_a_resumed_run_is_that_of_its_version(tmp_path):
    """B42: nothing is in flight at version 50, groups of 4: batches 50 to 52 may be issued, and no further one."""
    window = StalenessWindow(2)
    window.restore({"version": 50, "issued": 200, "trained": 200, "dropped": {}})
    assert [b for b in range(60) if window.may_issue(b) and b >= 50] == [50, 51, 52] and window.open == 0
    settings = config(steps=30, max_lag=2, replicas=2, trainer={"save_every": 5})
    whole = run_loops(settings, tmp_path / "whole", prompts_of(400, 4), rollouts=[FakeRollout(0.002)] * 2)
    rest = run_loops(
        settings, tmp_path / "rest", prompts_of(400, 4), rollouts=[FakeRollout(0.002)] * 2, resume=whole.saved[10]
    )
    assert max(rest.recorder.lags) <= 2 and len(metrics_of(tmp_path / "rest")) == 20
    assert rest.run.window.trained == 30 * 8


@pytest.mark.parametrize("at", [1, 3])
def test_surplus_that_waits_for_later_steps_is_in_the_cut(tmp_path, at):
    workflow = {"oversample": 1.5, "take": "ready", "max_lag": 2}
    settings = config(steps=6, max_lag=2, trainer={"save_every": 1}, workflow=workflow)
    whole = run_loops(settings, tmp_path / "whole", prompts_of(200, 4, epochs=1))
    rest = run_loops(settings, tmp_path / "rest", prompts_of(200, 4, epochs=1), resume=whole.saved[at])
    done = everything_trained(whole, rest, at)
    assert len(done) == len(set(done)) == 6 * 4
    window = rest.run.window
    assert window.issued == window.trained + window.open + sum(window.dropped.values())


class SometimesFlat(FakePool):
    """Every third prompt has equal rewards in all its answers."""

    def score(self, answers):
        found = super().score(answers)
        flat = [int(a.truth) % 3 == 0 for a in answers]
        return [type(s)(1.0 if f else s.value + i % 2, "") for i, (s, f) in enumerate(zip(found, flat))]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_replaced_prompts_are_not_issued_again_after_the_cut(tmp_path, max_lag):
    settings = config(steps=5, max_lag=max_lag, trainer={"save_every": 1}, algorithm={"dynamic_sampling": True})
    whole = run_loops(settings, tmp_path / "whole", prompts_of(60, 4, epochs=1), pool=SometimesFlat())
    rest = run_loops(
        settings, tmp_path / "rest", prompts_of(60, 4, epochs=1), pool=SometimesFlat(), resume=whole.saved[2]
    )
    done = everything_trained(whole, rest, 2)
    assert len(done) == len(set(done)) == 5 * 4 and all(i % 3 for _, i in done)
    if max_lag == 0:
        assert trained(rest, 0) == trained(whole, 2)
