"""The schedules over an engine whose answers can be interrupted: what is trained, kept, dropped, and by which rule."""

import asyncio
import threading
import time

import numpy as np
import pytest

from mindspeed_asyncflow.errors import DeadlineExceeded, WorkerLost
from mindspeed_asyncflow.workflow import answering
from tests.workflow.fakes import FakePool, FakeRollout, FakeTrain, prompts_of, run_loops
from tests.workflow.long_engine import long_engine, prompts_of_lengths
from tests.workflow.test_run import config


class Graded(FakePool):
    """The answers to prompts for which `flat(key)` holds all score the same."""

    def __init__(self, flat) -> None:
        super().__init__()
        self.flat, self.asked = flat, 0

    def score(self, answers):
        self.asked += len(answers)
        scores = super().score(answers)
        return [
            type(s)(0.0 if self.flat(int(a.truth)) else float(i), "") for i, (s, a) in enumerate(zip(scores, answers))
        ]


def later(delay_s, do):
    """Something that happens while the loops run."""
    return lambda run: asyncio.get_running_loop().call_later(delay_s, do, run)


def check_nothing_lost(out):
    window = out.run.window
    assert window.issued == window.trained + sum(window.dropped.values()) + window.open
    assert out.run.book.count() * out.run.book.group_size == window.open


@pytest.mark.slow
def test_ready_steps_train_what_is_complete_and_leave_nothing_to_become_stale(tmp_path):
    """Every fourth prompt answers many times longer than the others; two versions of lag are allowed."""
    out = run_loops(
        config(steps=8, max_lag=2, replicas=2, workflow={"take": "ready"}, rollout={"max_new_tokens": 40}),
        tmp_path,
        prompts_of_lengths(lambda i: 40 if i % 4 == 0 else 2, 4),
        rollouts=[long_engine(0.001), long_engine(0.001)],
    )
    assert out.run.window.dropped == {} and max(out.recorder.lags) <= 2
    assert [len(rows) for rows in out.train.rows[:8]] == [8] * 8
    check_nothing_lost(out)


def test_surplus_of_a_step_is_trained_by_later_ones(tmp_path):
    """B49: six groups are issued where a step trains four; one of them answers late."""
    trained = []

    class Looking(FakeTrain):
        def forward_backward(self, micro_batches):
            keys = [int(k) for b in micro_batches for k in b.input_ids[b.cu_seqlens[:-1] + 1]]
            trained.extend((self.version, key) for key in keys)
            return super().forward_backward(micro_batches)

    out = run_loops(
        config(steps=8, max_lag=3, workflow={"oversample": 1.5}, rollout={"max_new_tokens": 30}),
        tmp_path,
        prompts_of_lengths(lambda i: 30 if i % 6 == 0 else 2, 4),
        rollouts=[long_engine(0.001)],
        train=Looking(delay_s=0.004),
    )
    assert [len(rows) for rows in out.train.rows[:8]] == [8] * 8 and max(out.recorder.lags) <= 3
    assert any(key // 6 < step for step, key in trained), "no step trained what an earlier one had left over"
    assert len({key for _, key in trained}) == len(trained) / 2  # nothing twice
    assert set(out.run.window.dropped) <= {"stale"}
    check_nothing_lost(out)


def test_without_lag_a_step_does_not_wait_for_its_slowest_answers_and_counts_them_as_surplus(tmp_path):
    longest = {3, 9}
    out = run_loops(
        config(steps=2, max_lag=0, workflow={"oversample": 1.5}, rollout={"max_new_tokens": 4000}),
        tmp_path,
        prompts_of_lengths(lambda i: 4000 if i in longest else 2, 4),
        rollouts=[long_engine(0.001)],
    )
    assert [len(rows) for rows in out.train.rows[:2]] == [8, 8]
    assert out.run.window.dropped == {"surplus": 8}
    assert out.dock_used_bytes == 0
    check_nothing_lost(out)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_groups_of_equal_rewards_are_replaced_so_that_steps_stay_full(tmp_path, max_lag):
    out = run_loops(
        config(steps=4, max_lag=max_lag, algorithm={"dynamic_sampling": True}),
        tmp_path,
        prompts_of(1000, 4),
        pool=Graded(lambda key: key % 2 == 0),
    )
    assert [len(rows) for rows in out.train.rows[:4]] == [8] * 4
    assert out.run.window.dropped["zero_variance"] > 0
    check_nothing_lost(out)


def test_answers_that_are_scored_before_their_put_is_known_are_dropped_and_trained_as_others(tmp_path):
    """The dock tells replicas of rows at once, and the feeder a moment later."""

    def before(run):
        put = run.dock.put_groups

        async def slow(groups):
            await put(groups)
            await asyncio.sleep(0.05)

        run.dock.put_groups = slow

    settings = config(steps=4, max_lag=1, algorithm={"dynamic_sampling": True})
    pool = Graded(lambda key: key % 2 == 0)
    out = run_loops(settings, tmp_path, prompts_of(1000, 4), pool=pool, before=before)
    assert [len(rows) for rows in out.train.rows[:4]] == [8] * 4 and out.run.window.dropped["zero_variance"] > 0
    check_nothing_lost(out)


def test_refilling_is_bounded_when_all_rewards_are_equal(tmp_path):
    """B57: every step goes short after workflow.max_refills times its groups, and the run ends."""
    pool = Graded(lambda key: True)
    settings = config(steps=3, max_lag=0, algorithm={"dynamic_sampling": True}, workflow={"max_refills": 2})
    out = run_loops(settings, tmp_path, prompts_of(1000, 4), pool=pool)
    assert out.train.rows[:3] == [[], [], []] and out.train.denominators == [0.0, 0.0, 0.0]
    assert pool.asked == 3 * 3 * 8
    assert out.run.window.dropped == {"zero_variance": 72}


def test_the_end_of_the_data_stops_refills_too(tmp_path):
    settings = config(steps=9, max_lag=0, algorithm={"dynamic_sampling": True})
    out = run_loops(settings, tmp_path, prompts_of(8, 4, epochs=1), pool=Graded(lambda key: key == 1))
    assert "the data ended: from step 2 on dropped groups were not replaced" in out.recorder.note
    assert sum(len(rows) for rows in out.train.rows) == 14


@pytest.mark.slow
def test_long_answers_go_on_over_steps_and_are_trained_whole_in_order(tmp_path):
    """B31: rounds of 5 tokens; token i of a prompt is key + 10 + i, its log-probability minus its version."""
    seen = {}

    class Looking(FakeTrain):
        def forward_backward(self, micro_batches):
            for batch in micro_batches:
                on = batch.loss_mask > 0
                for sample in np.unique(batch.sample_index[on]):
                    of = on & (batch.sample_index == sample)
                    seen[int(batch.rows[sample])] = (batch.targets[of], -batch.rollout_logprobs[of])
            return super().forward_backward(micro_batches)

    out = run_loops(
        config(
            steps=8,
            max_lag=4,
            replicas=2,
            workflow={"partial_rounds": 4, "take": "ready"},
            rollout={"max_new_tokens": 20},
        ),
        tmp_path,
        prompts_of_lengths(lambda i: 20 if i % 3 == 0 else 3, 4),
        rollouts=[long_engine(0.001), long_engine(0.001)],
        train=Looking(),
    )
    assert len(seen) == out.run.window.trained == 64
    for tokens, versions in seen.values():
        assert len(tokens) in (3, 20) and (np.diff(tokens) == 1).all()
        assert (np.diff(versions) >= 0).all()
    assert max(versions.max() - versions.min() for _, versions in seen.values()) > 0  # some were sampled by several
    assert max(out.recorder.lags) <= 4
    check_nothing_lost(out)


def test_lanes_keep_a_replica_busy_while_its_long_answers_go_on(tmp_path):
    settings = config(steps=6, max_lag=2, workflow={"update": "in_flight", "lanes": 3}, rollout={"max_new_tokens": 30})
    engine = long_engine(0.001)
    out = run_loops(settings, tmp_path, prompts_of_lengths(lambda i: 30 if i == 0 else 2, 4), rollouts=[engine])
    assert [len(rows) for rows in out.train.rows[:6]] == [8] * 6 and max(out.recorder.lags) <= 2
    check_nothing_lost(out)


@pytest.mark.slow
def test_the_last_answers_of_a_replica_move_to_a_busier_one(tmp_path):
    moved = []

    class Events:
        def note(self, kind, **fields):
            if kind == "repacked":
                moved.append(fields)

    def listen(run):
        run.job.events = Events()

    out = run_loops(
        config(steps=4, max_lag=1, replicas=2, workflow={"repack_below": 2}, rollout={"max_new_tokens": 1500}),
        tmp_path,
        prompts_of_lengths(lambda i: 1500 if i in (0, 1, 2) else 2, 4),
        rollouts=[long_engine(0.001), long_engine(0.001)],
        before=listen,
    )
    assert moved and all(m["source"] != m["target"] for m in moved)
    assert [len(rows) for rows in out.train.rows[:4]] == [8] * 4 and out.run.window.dropped == {}
    check_nothing_lost(out)


# ---- the pool of replicas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_replica_that_dies_changes_speed_and_loses_nothing(tmp_path, max_lag):
    """Also without lag, where the others are dealt what it held."""
    out = run_loops(
        config(steps=6, max_lag=max_lag, replicas=3, rollout={"max_new_tokens": 20}),
        tmp_path,
        prompts_of_lengths(lambda i: 20, 4),
        rollouts=[long_engine(0.002) for _ in range(3)],
        before=later(0.06, lambda run: run.job.crew.rollouts[1].kill()),
    )
    assert sorted(out.run.job.crew.rollouts) == [0, 2]
    assert (out.run.window.trained, out.run.window.open) == (48, 0) and out.run.window.dropped == {}
    assert out.dock_used_bytes == 0


def test_when_the_last_replica_dies_the_run_ends_at_once_and_says_so(tmp_path):
    """B47."""
    with pytest.raises(WorkerLost, match=r"no rollout replica is left.*the process died"):
        run_loops(
            config(steps=500, rollout={"max_new_tokens": 20}),
            tmp_path,
            prompts_of_lengths(lambda i: 20, 4),
            rollouts=[long_engine(0.002)],
            before=later(0.05, lambda run: run.job.crew.rollouts[0].kill()),
        )


def test_a_replica_that_joins_late_takes_its_share(tmp_path):
    engines = [long_engine(0.004), long_engine(0.001)]
    asked = []
    generate = engines[1].generate
    engines[1].generate = lambda requests, *how, **more: asked.append(len(requests)) or generate(requests, *how, **more)
    out = run_loops(
        config(steps=8, max_lag=1, replicas=2, rollout={"max_new_tokens": 10}),
        tmp_path,
        prompts_of_lengths(lambda i: 10, 4),
        rollouts=engines,
        late=(1,),
        before=later(0.05, lambda run: run.join(1, run.late[1])),
    )
    assert asked and out.run.window.trained == 64 and max(out.recorder.lags) <= 1
    assert not out.run.job.crew.starting


@pytest.mark.slow
def test_a_replica_that_leaves_hands_its_answers_over(tmp_path):
    left = threading.Event()

    def leave(run):
        asyncio.ensure_future(run.leave(1)).add_done_callback(lambda _: left.set())

    out = run_loops(
        config(steps=6, max_lag=1, replicas=2, workflow={"repack_below": 1}, rollout={"max_new_tokens": 20}),
        tmp_path,
        prompts_of_lengths(lambda i: 20, 4),
        rollouts=[long_engine(0.002), long_engine(0.002)],
        before=later(0.05, leave),
    )
    assert left.is_set() and sorted(out.run.job.crew.rollouts) == [0]
    assert out.run.window.trained == 48 and out.run.window.dropped == {}


def test_one_task_at_a_time_sums_the_very_chunks_of_a_streamed_step(tmp_path):
    """max_lag 0: the synchronous run and the streamed one differ in time only."""

    class Noting(FakeTrain):
        calls: list

        def forward_backward(self, micro_batches):
            self.calls.append([b.input_ids.tolist() for b in micro_batches])
            return super().forward_backward(micro_batches)

    seen = []
    for overlap in (True, False):
        train = Noting()
        train.calls = []
        settings = config(steps=3, max_lag=0, groups=8, workflow={"overlap": overlap})
        run_loops(settings, tmp_path / str(overlap), prompts_of(100, 8), train=train, rollouts=[FakeRollout()])
        seen.append(train.calls)
    assert seen[0] == seen[1] and len(seen[0]) == 12


@pytest.mark.parametrize("stream_groups", [1, 2, 4])
def test_the_version_rises_once_per_global_batch_whatever_the_dispatch_size(tmp_path, stream_groups):
    """B54."""
    out = run_loops(config(steps=3, max_lag=1, trainer={"stream_groups": stream_groups}), tmp_path, prompts_of(100, 4))
    assert out.run.window.version == out.train.version == 3
    assert out.train.denominators == [16.0] * 3  # eight answers of two tokens


@pytest.mark.slow
def test_nothing_that_the_loops_remember_grows_with_the_run(tmp_path):
    """B94: sizes of everything that the driver's bookkeeping holds, after 5 steps and after 60."""

    def sizes(steps):
        settings = config(
            steps=steps,
            max_lag=2,
            replicas=2,
            algorithm={"dynamic_sampling": True},
            workflow={"take": "ready", "keep_versions": 3},
        )
        out = run_loops(settings, tmp_path / str(steps), prompts_of(10**6, 4), pool=Graded(lambda key: key % 5 == 0))
        run = out.run
        parts = (
            run.book,
            run.feeder,
            run.answering,
            run.training,
            run.scoring,
            run.sync,
            run.sync.arrivals,
            run.window,
        )
        held = {f"{type(p).__name__}.{n}": v for p in parts for n, v in vars(p).items() if hasattr(v, "__len__")}
        return {name: len(value) for name, value in held.items()}

    few, many = sizes(5), sizes(60)
    allowed = 3 * 4 * 2 + 4  # what may be open at any moment, and the prompts of one batch
    assert {name: n for name, n in many.items() if n > max(few[name], allowed)} == {}


@pytest.mark.slow
def test_a_replica_that_hangs_is_lost_after_its_deadline_and_its_process_is_ended(tmp_path):
    """Its worker would keep rollout.timeout_s itself, if it lived."""
    ended = []

    def freeze(run):
        run.job.crew.end = ended.append
        run.job.crew.rollouts[1].worker.engine.pause("keep", False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "GRACE_S", 0.2)
        out = run_loops(
            config(steps=6, replicas=2, rollout={"max_new_tokens": 20, "timeout_s": 0.3}),
            tmp_path,
            prompts_of_lengths(lambda i: 20, 4),
            rollouts=[long_engine(0.002), long_engine(0.002)],
            before=later(0.05, freeze),
        )
    assert ended == [1] and sorted(out.run.job.crew.rollouts) == [0]
    assert out.run.window.trained == 48 and out.run.window.dropped == {}


@pytest.mark.slow
def test_the_watchdog_names_the_worker_that_hangs_and_for_how_long(tmp_path):
    def hang(run):
        run.job.crew.scorer.worker.score = lambda *args: time.sleep(3)

    with pytest.raises(DeadlineExceeded, match=r"workers: scorer has been in `score` for [1-9]\.\d s"):
        run_loops(config(workflow={"watchdog_s": 1.0}), tmp_path, prompts_of(100, 4), before=hang)
