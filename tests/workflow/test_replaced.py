"""Replicas that die and come back in a new process: the real loops over engines without a model."""

import asyncio

import pytest

from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.workflow.workers import RolloutWorker
from tests.workflow.fakes import FakePool, FakeRollout, Local, prompts_of, run_loops
from tests.workflow.test_run import config
from tests.workflow.test_schedules import long_engine, prompts_of_lengths

pytestmark = pytest.mark.slow
STEPS, GROUPS, MEMBERS = 6, 4, 2


class Counting(FakeRollout):
    """Says which answers it was asked for, and gives none any more once it was closed in the middle."""

    def __init__(self, delay_s):
        super().__init__(delay_s=delay_s)
        self.prompts: list[int] = []
        self.lives = 0

    def generate(self, requests, timeout_s, stream=None):
        self.prompts += [int(r.prompt_ids[0]) for r in requests]
        life = self.lives
        for answer in super().generate(requests, timeout_s, stream):
            if self.lives != life:
                raise RuntimeError("this process is dead")
            yield answer

    def close(self):
        self.lives += 1


def again(worker, engine):
    """What `worker` was, over another engine."""
    return RolloutWorker(
        engine,
        worker.dock,
        worker.sampling,
        name=worker.name,
        seed=worker.seed,
        commit_groups=worker.commit_groups,
        timeout_s=worker.timeout_s,
        tracer=worker.tracer,
        group_size=worker.group_size,
        stream_out_s=worker.stream_out_s,
    )


class Scored(FakePool):
    def __init__(self):
        super().__init__()
        self.texts: list[str] = []

    def score(self, answers):
        self.texts += [a.text for a in answers]
        return super().score(answers)


def dying(index, after_s, back_s, comes=True, deaths=1, engine=None, into_s=0.0):
    """Replica `index` dies while it answers, at the earliest `after_s` into the run, and another process takes its
    place `back_s` later, `deaths` times; or it is given up then, where none `comes`."""

    def before(run):
        crew = run.job.crew
        crew.comes_back = lambda i: True

        async def die_and_come_back():
            for _ in range(deaths):
                await asyncio.sleep(after_s)
                for begun in (False, True):  # `into_s` after the beginning of a batch
                    while (f"rollout{index} answers" in run.answering.describe()) != begun:
                        await asyncio.sleep(0.001)
                await asyncio.sleep(into_s)
                dead = crew.rollouts[index]
                dead.kill()
                await asyncio.sleep(back_s)
                if not comes:
                    run.answering.failed_to_start(index, WorkerLost("no memory"))
                else:
                    worker = dead.worker if engine is None else again(dead.worker, engine())
                    run.join(index, Local(worker, dead._aside))

        run.job.spawn(die_and_come_back())

    return before


def whole(out, replicas):
    window = out.run.window
    assert (window.trained, window.open, window.dropped) == (STEPS * GROUPS * MEMBERS, 0, {})
    assert out.dock_used_bytes == 0 and sorted(out.run.job.crew.rollouts) == list(range(replicas))


@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_last_replica_may_die_the_run_waits_for_its_replacement_longer_than_the_watchdog_does(tmp_path, max_lag):
    out = run_loops(
        config(max_lag=max_lag, workflow={"watchdog_s": 0.5}),
        tmp_path,
        prompts_of(100, GROUPS),
        rollouts=[FakeRollout(delay_s=0.03)],
        before=dying(0, 0.05, 1.0),
    )
    whole(out, 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_may_die_again_and_again_and_its_tokens_go_on_where_they_were_streamed_out(tmp_path, replicas):
    """Tokens count by place, so an answer that lost or repeated some would have the wrong ones."""
    admitted, made = [], []

    def engine():
        made.append(long_engine(0.004))
        admit = made[-1]._backend.admit
        made[-1]._backend.admit = lambda requests: admitted.extend(requests) or admit(requests)
        return made[-1]

    scored = Scored()
    out = run_loops(
        config(max_lag=1, replicas=replicas, faults={"stream_out_s": 0.004}, rollout={"max_new_tokens": 20}),
        tmp_path,
        prompts_of_lengths(lambda i: 20, GROUPS),
        rollouts=[engine() for _ in range(replicas)],
        pool=scored,
        before=dying(replicas - 1, 0.08, 0.02, deaths=3, engine=engine, into_s=0.05),
    )
    whole(out, replicas)
    assert sorted(scored.texts) == sorted(
        str(float(sum(range(i + 10, i + 30)))) for i in range(STEPS * GROUPS) for _ in range(MEMBERS)
    )
    continued = [len(r.resume_ids) for r in admitted if r.resume_ids is not None]
    assert continued and max(continued) > 4


def test_without_lag_the_share_of_a_dead_replica_waits_for_its_replacement(tmp_path):
    """So that every seed is drawn where it would have been: nobody else answers a prompt of that share."""

    def shares(before=None):
        rollouts = [Counting(0.04), Counting(0.04)]
        out = run_loops(
            config(max_lag=0, replicas=2), tmp_path, prompts_of(100, GROUPS), rollouts=rollouts, before=before
        )
        whole(out, 2)
        return [sorted(set(engine.prompts)) for engine in rollouts], rollouts[0].prompts

    undisturbed, once = shares()
    disturbed, again = shares(dying(0, 0.05, 0.1))
    assert disturbed == undisturbed and len(again) > len(once)


def test_without_lag_others_answer_the_share_of_a_replica_that_is_given_up(tmp_path):
    rollouts = [Counting(0.04), Counting(0.04)]
    out = run_loops(
        config(max_lag=0, replicas=2),
        tmp_path,
        prompts_of(100, GROUPS),
        rollouts=rollouts,
        before=dying(0, 0.05, 0.1, comes=False),
    )
    assert out.run.window.trained == STEPS * GROUPS * MEMBERS and sorted(out.run.job.crew.rollouts) == [1]
    assert len(rollouts[1].prompts) > STEPS * GROUPS * MEMBERS // 2


def test_when_the_replacement_of_the_last_replica_does_not_come_the_run_ends(tmp_path):
    with pytest.raises(WorkerLost, match="no rollout replica is left; the last one did not start: no memory"):
        run_loops(
            config(steps=500),
            tmp_path,
            prompts_of(100, GROUPS),
            rollouts=[FakeRollout(delay_s=0.02)],
            before=dying(0, 0.05, 0.05, comes=False),
        )
