"""The loops over fake engines: schedules, the staleness law, ends and failures."""

import itertools
import json
import time

import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import DeadlineExceeded, EngineError, WeightSyncError
from mindspeed_asyncflow.observe.summary import check_summary
from tests.workflow.fakes import FakePool, FakeRollout, FakeTrain, prompts_of, run_loops


def config(steps=6, max_lag=1, groups=4, replicas=1, **more):
    sections = {
        "trainer": {"steps": steps},
        "algorithm": {"group_size": 2},
        "workflow": {"groups_per_step": groups, "max_lag": max_lag, "watchdog_s": 5.0},
        "rollout": {"replicas": replicas, "max_new_tokens": 2},
    }
    for name, values in more.items():
        sections.setdefault(name, {}).update(values)
    return Config.model_validate(sections)


def test_delayed_update_samples_with_versions_0_0_1_2(tmp_path):
    out = run_loops(config(steps=5), tmp_path, prompts_of(100, 4))
    assert [set(v) for v in out.train.seen_versions[:5]] == [{0}, {0}, {1}, {2}, {3}]
    assert max(out.recorder.lags) == 1


def test_lag_0_trains_every_token_at_the_version_that_sampled_it(tmp_path):
    """B44: a slow trainer, six steps."""
    out = run_loops(config(max_lag=0), tmp_path, prompts_of(100, 4), train=FakeTrain(delay_s=0.01))
    assert [set(v) for v in out.train.seen_versions[:6]] == [{0}, {1}, {2}, {3}, {4}, {5}]
    assert set(out.recorder.lags) == {0}


@pytest.mark.parametrize("update", ["delayed", "rolling", "in_flight"])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("replicas", [1, 3])
def test_law_holds_and_nothing_is_lost_for_any_window_and_pool(tmp_path, max_lag, replicas, update):
    rollouts = [FakeRollout(delay_s=0.004 * i, load_s=0.003) for i in range(replicas)]
    out = run_loops(
        config(max_lag=max_lag, replicas=replicas, workflow={"update": update}),
        tmp_path,
        prompts_of(100, 4),
        rollouts=rollouts,
    )
    window = out.run.window
    assert max(out.recorder.lags) <= max_lag
    assert (window.issued, window.trained, window.open) == (48, 48, 0)
    assert [len(r) for r in out.train.rows[:6]] == [8] * 6
    assert out.dock_used_bytes == 0


@pytest.mark.parametrize("update", ["delayed", "rolling", "in_flight"])
def test_lag_0_trains_the_same_rows_at_the_same_versions_however_weights_are_updated(tmp_path, update):
    settings = config(max_lag=0, replicas=2, workflow={"update": update})
    out = run_loops(settings, tmp_path, prompts_of(100, 4), publish_s=0.01)
    assert [set(v) for v in out.train.seen_versions[:6]] == [{v} for v in range(6)]
    assert out.run.window.dropped == {} and out.run.sync.newest.version == 6


@pytest.mark.slow
def test_the_trainer_goes_on_while_its_weights_are_written(tmp_path):
    """A version takes as long to write as a step to compute: both overlap, only the rest of it is waited for."""
    train = FakeTrain(delay_s=0.05)
    out = run_loops(config(steps=6, max_lag=1), tmp_path, prompts_of(100, 4), train=train, publish_s=0.15)
    rows = metrics_of(tmp_path)
    assert all(row["weight_sync/publish_s"] >= 0.15 for row in rows)
    steady = rows[2:]
    assert all(row["weight_sync/publish_exposed_s"] < 0.1 for row in steady)
    assert all(row["timing_s/step"] < 0.15 + 4 * 0.05 for row in steady)  # in turn it would be at least that
    assert out.run.window.published == 6


@pytest.mark.parametrize("update", ["delayed", "in_flight"])
def test_a_slow_probe_of_the_trainer_outlives_the_loops(tmp_path, update):
    """The last version is loaded and checked after the end, when replicas answer held-out prompts."""
    settings = config(steps=3, workflow={"update": update})
    out = run_loops(settings, tmp_path, prompts_of(100, 4), train=FakeTrain(probe_s=0.1))
    assert out.run.sync.served == [3] and out.run.sync.gap_max == 0.0


def metrics_of(folder):
    (file,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_weights_never_change_while_they_are_written(tmp_path):
    """The optimizer of a quick step waits for a slow relay."""
    train = FakeTrain(weights=200_000)
    out = run_loops(config(steps=5, max_lag=3), tmp_path, prompts_of(100, 4), train=train, publish_s=0.03)
    assert out.run.window.published == 5
    assert out.changed_while_written == 0


def test_in_flight_answers_go_on_with_new_weights_and_count_their_oldest_token(tmp_path):
    """The second replica is slow: versions are published while it answers, and its answers have two."""
    rollouts = [FakeRollout(), FakeRollout(delay_s=0.2)]
    settings = config(steps=8, max_lag=2, replicas=2, workflow={"update": "in_flight"})
    out = run_loops(settings, tmp_path, prompts_of(100, 4), rollouts=rollouts)
    assert max(row["staleness/version_span_max"] for row in metrics_of(tmp_path)) >= 2
    assert max(out.recorder.lags) <= 2


def test_rolling_loads_one_replica_at_a_time_and_the_others_answer_meanwhile(tmp_path):
    rollouts = [FakeRollout(delay_s=0.01, load_s=0.03) for _ in range(3)]
    settings = config(steps=8, max_lag=2, replicas=3, groups=6, workflow={"update": "rolling"})
    run_loops(settings, tmp_path, prompts_of(100, 6), rollouts=rollouts)
    loads = sorted((begin, end, i) for i, r in enumerate(rollouts) for _, begin, end in r.loads)
    assert all(end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(loads))
    answered = [
        any(begin < at < end for j, r in enumerate(rollouts) if j != i for at in r.answers_at)
        for begin, end, i in loads[3:]
    ]
    assert any(answered)


def test_an_engine_that_serves_other_weights_than_it_says_stops_the_run(tmp_path):
    liar = FakeRollout()
    with pytest.raises(WeightSyncError, match=r"rollout0 answered with version .* fingerprint feed"):
        run_loops(
            config(), tmp_path, prompts_of(100, 4), rollouts=[liar], before=lambda run: setattr(liar, "lies", "feed")
        )


def test_a_trainer_whose_weights_stand_still_stops_the_run(tmp_path):
    train = FakeTrain()
    train.frozen = True
    with pytest.raises(WeightSyncError, match="weights do not move"):
        run_loops(config(), tmp_path, prompts_of(100, 4), train=train)


@pytest.mark.parametrize("update", ["delayed", "rolling", "in_flight"])
def test_a_link_slower_than_the_trainer_loses_nothing_while_more_versions_than_max_lag_are_kept(tmp_path, update):
    """Loads of 40 ms, steps of about 10 ms and two versions in memory: the law holds the trainer back."""
    rollouts = [FakeRollout(), FakeRollout(load_s=0.04)]
    settings = config(steps=8, max_lag=1, replicas=2, workflow={"update": update, "keep_versions": 2})
    out = run_loops(settings, tmp_path, prompts_of(100, 4), rollouts=rollouts)
    assert out.run.window.trained == 64 and max(out.recorder.lags) <= 1


def test_a_relay_that_cannot_be_written_ends_the_run_with_its_error(tmp_path):
    def fail(version, tensors):
        raise OSError("no space")

    def broken(run):
        run.job.crew.trainers[0].worker.publisher.relay.publish = fail

    with pytest.raises(OSError, match="no space"):
        run_loops(config(), tmp_path, prompts_of(100, 4), before=broken)


def test_an_answer_whose_oldest_token_is_too_old_is_dropped_counted_and_asked_again(tmp_path):
    """B44: the newest token is fresh, the oldest is three versions back; the claim refuses the answer."""
    rollout = FakeRollout()

    class Stale(FakeTrain):
        def optim_step(self, denominator):
            if self.version == 3:
                rollout.stale_answers = 3
            return super().optim_step(denominator)

    out = run_loops(config(steps=8), tmp_path, prompts_of(100, 4), rollouts=[rollout], train=Stale())
    window = out.run.window
    assert window.dropped["stale"] > 0
    assert max(out.recorder.lags) <= 1
    assert window.issued == window.trained + window.dropped["stale"]
    assert [len(r) for r in out.train.rows[:8]] == [8] * 8


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [8] * 8), (False, [8, 8, 4, 8, 8, 4, 8, 8])])
def test_epochs_follow_one_another_and_a_short_batch_is_trained_short(tmp_path, drop_last, sizes):
    """B45: ten prompts, batch 4, eight steps."""
    out = run_loops(config(steps=8), tmp_path, prompts_of(10, 4, drop_last=drop_last))
    assert [len(r) for r in out.train.rows[:8]] == sizes


@pytest.mark.parametrize(("drop_last", "steps"), [(True, 2), (False, 3)])
def test_end_of_the_data_ends_the_run_in_order(tmp_path, drop_last, steps):
    """B45: epochs 1; the run says so and keeps what it trained."""
    out = run_loops(config(steps=8), tmp_path, prompts_of(10, 4, epochs=1, drop_last=drop_last))
    assert out.train.version == steps
    assert "data ends after" in out.recorder.note
    assert out.run.window.open == 0


def test_a_rollout_error_after_two_samples_ends_the_run_with_that_error(tmp_path):
    """B46: the root error arrives, nothing is saved as final."""
    windows, saved = [], []

    def before(run):
        async def save(*args, **how):
            saved.append(args)

        windows.append(run.window)
        run.training.save = save

    with pytest.raises(RuntimeError, match="the engine broke"):
        run_loops(
            config(trainer={"save_every": 1}),
            tmp_path,
            prompts_of(100, 4),
            rollouts=[FakeRollout(fail_after=2)],
            before=before,
        )
    assert windows[0].trained == 0 and saved == []


@pytest.mark.slow
def test_a_run_without_progress_stops_and_names_who_waits(tmp_path):
    """B47: collectors that never answer."""
    began = time.monotonic()
    said = r"(?s)workflow\.watchdog_s.*trainer: step 0 has 0 of 4.*rollout0 answers.*weights: version 0.*reward"
    with pytest.raises(DeadlineExceeded, match=said):
        run_loops(
            config(workflow={"watchdog_s": 1.0}), tmp_path, prompts_of(100, 4), rollouts=[FakeRollout(silent_s=3.0)]
        )
    assert time.monotonic() - began < 12


def test_groups_without_scores_leave_their_step_and_are_counted(tmp_path):
    pool = FakePool()
    pool.silent_truths = {"1", "2"}
    out = run_loops(config(steps=3), tmp_path, prompts_of(100, 4), pool=pool)
    window = out.run.window
    assert [len(r) for r in out.train.rows[:3]] == [4, 8, 8]
    assert dict(window.dropped) == {"unscored": 4}
    assert window.issued == window.trained + 4


def test_answers_may_be_trained_before_the_report_of_their_scorer_arrives(tmp_path):
    def late(run):
        score = run.job.crew.scorer.worker.score

        def then_sleep(*args):
            report = score(*args)
            time.sleep(0.05)
            return report

        run.job.crew.scorer.worker.score = then_sleep

    out = run_loops(config(steps=3), tmp_path, prompts_of(100, 4), before=late)
    assert len(out.recorder.rewards) == 3 and min(out.recorder.rewards) > 0


def test_non_finite_steps_in_a_row_stop_the_run_and_name_the_tensor(tmp_path):
    """B26: one bad step is counted and survived, three in a row are not."""
    once = FakeTrain()
    once.bad_steps = {1}
    assert run_loops(config(), tmp_path, prompts_of(100, 4), train=once).recorder.skipped == 1
    always = FakeTrain()
    always.bad_steps = set(range(10))
    with pytest.raises(EngineError, match=r"layer\.weight.*trainer\.max_bad_steps"):
        run_loops(config(), tmp_path, prompts_of(100, 4), train=always)


def test_one_task_at_a_time_trains_the_same_rows_as_overlapped(tmp_path):
    kwargs = dict(steps=4, max_lag=0)
    overlapped = run_loops(config(**kwargs), tmp_path / "a", prompts_of(100, 4))
    in_turn = run_loops(config(**kwargs, workflow={"overlap": False}), tmp_path / "b", prompts_of(100, 4))
    assert [sorted(v) for v in overlapped.train.seen_versions] == [sorted(v) for v in in_turn.train.seen_versions]
    assert overlapped.train.denominators == in_turn.train.denominators


def test_every_step_divides_by_the_tokens_of_its_global_batch(tmp_path):
    out = run_loops(config(steps=3), tmp_path, prompts_of(100, 4))
    assert out.train.denominators == [16.0, 16.0, 16.0]


@pytest.mark.slow
def test_a_run_whose_answers_all_go_without_a_score_ends_with_a_valid_summary_and_untouched_weights(tmp_path):
    """B09, B05: nothing to train on is no step of the optimizer, no NaN and no lost report."""
    pool = FakePool()
    pool.silent_truths = {str(i) for i in range(100)}
    out = run_loops(config(steps=2), tmp_path, prompts_of(100, 4), pool=pool)
    summary = out.recorder.summary(out.run.window, out.run.sync, 1.0)
    check_summary(summary)
    assert summary["reward_first"] is None and summary["steps"] == 2
    assert out.train.denominators == [0.0, 0.0]
    assert summary["dropped_by_reason"] == {"unscored": 16}
