"""Runs whose scorer dies and whose dock pair is started again, at any moment: the real loops over fake engines."""

import asyncio
import random

import numpy as np
import pytest

from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import WorkerReplaced
from mindspeed_asyncflow.rewards.pool import Score
from mindspeed_asyncflow.workflow import feeding
from mindspeed_asyncflow.workflow import job as job_module
from tests.workflow import fakes
from tests.workflow.fakes import FakePool, FakeRollout, FakeTrain, prompts_of, run_loops
from tests.workflow.test_run import config

MODES = {
    "lag": {"workflow": {"max_lag": 1}},
    "no lag": {"workflow": {"max_lag": 0}},
    "one task at a time": {"workflow": {"max_lag": 0, "overlap": False}},
    "any groups": {"workflow": {"max_lag": 2, "take": "ready"}},
}


class Dying:
    """A scorer whose process is replaced before it begins, or after it wrote its scores and before it said so."""

    def __init__(self, worker, seed) -> None:
        self.worker, self.rng, self.deaths = worker, random.Random(seed), 0

    async def score(self, claim_id, batch, again=False):
        moment = self.rng.choice(["before", "after", "not"])
        if moment != "before":
            report = await self.worker.score(claim_id, batch, again)
        if moment != "not":
            self.deaths += 1
            raise WorkerReplaced("the scorer died")
        return report

    def __getattr__(self, name):
        return getattr(self.worker, name)


class Moody(FakePool):
    """Never gives an answer the same score twice, and sometimes none."""

    def __init__(self, seed) -> None:
        self.rng = np.random.default_rng(seed)

    def score(self, answers):
        values = [None if x < 0.1 else float(x) for x in self.rng.random(len(answers))]
        return [Score(v, "" if v is not None else "abstained") for v in values]


def once(out, steps=6):
    """Rows that were trained, each once; every sample is accounted for and nothing is left in the dock."""
    window = out.run.window
    rows = [r for step in out.train.rows for r in step]
    assert len(rows) == len(set(rows)) == window.trained
    assert (window.version, window.open, out.dock_used_bytes) == (steps, 0, 0)
    return window


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(2))
def test_a_scorer_may_die_at_any_moment_and_no_sample_is_lost_or_trained_twice(tmp_path, mode, seed):
    """Also where scores differ when they are given again, and some answers have none."""
    scorers = []

    def before(run):
        scorers.append(Dying(run.job.crew.scorer, seed))
        run.job.crew.scorer = scorers[0]

    out = run_loops(config(**MODES[mode]), tmp_path, prompts_of(100, 4), pool=Moody(seed), before=before)
    window = once(out)
    assert scorers[0].deaths >= 3
    assert window.issued == window.trained + window.dropped["unscored"] == 48


def test_flat_groups_that_a_dead_scorer_had_found_are_dropped_and_replaced_once(tmp_path):
    class Half(FakePool):
        def score(self, answers):
            return [Score(float(i % 2 * (int(a.truth) % 2)), "") for i, a in enumerate(answers)]

    def before(run):
        run.job.crew.scorer = Dying(run.job.crew.scorer, 1)

    settings = config(algorithm={"dynamic_sampling": True}, workflow={"max_refills": 4})
    window = once(run_loops(settings, tmp_path, prompts_of(100, 4), pool=Half(), before=before))
    assert window.trained == 48 and window.issued == 48 + window.dropped["zero_variance"]


class Restartable(DockServer):
    """Can end as a killed process does: arena and journal stay."""

    made: list = []

    def __init__(self, columns, tasks, **how) -> None:
        super().__init__(columns, tasks, **how)
        self.how, self.at = ((columns, tasks), how), super().address
        self.made.append(self)

    @property
    def address(self):
        return self.at

    def crash(self) -> None:
        self._stop = True
        self._wake_send.send(b"x")
        self._thread.join(10)
        self._listener.close()
        self._local_listener.close()

    def again(self) -> None:
        """Killed, and started again at the same address on the same memory."""
        port = int(self.address.rpartition(":")[2])
        self.crash()
        (columns, tasks), how = self.how
        Restartable(columns, tasks, **how | {"port": port, "arena_path": self.arena_path, "restart": True}).start()

    def empty_again(self, life) -> None:
        """As `again`, with its memory lost."""
        port = int(self.address.rpartition(":")[2])
        self.crash()
        (columns, tasks), how = self.how
        Restartable(columns, tasks, **how | {"port": port, "life": life}).start()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_dock_pair_may_be_started_again_at_any_moment_of_a_run(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(fakes, "DockServer", Restartable)
    monkeypatch.setattr(Restartable, "made", made := [])
    rng = random.Random(mode)

    async def kill_again_and_again(run):
        while True:
            await asyncio.sleep(rng.uniform(0.01, 0.25))
            await asyncio.to_thread(made[-1].again)

    rollouts = [FakeRollout(delay_s=0.03), FakeRollout(delay_s=0.02)]
    settings = config(replicas=2, **MODES[mode])
    try:
        out = run_loops(
            settings, tmp_path, prompts_of(100, 4), rollouts=rollouts, train=FakeTrain(delay_s=0.01),
            before=lambda run: run.job.spawn(kill_again_and_again(run)),
        )  # fmt: skip
    finally:
        made[-1].close()
    window = once(out)
    assert len(made) >= 4
    assert window.issued == window.trained == 48


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_where_a_dock_pair_loses_its_memory_the_prompts_of_its_rows_are_issued_again(tmp_path, monkeypatch, mode):
    """While the trainer holds none of its rows; nothing waits for what is gone."""
    monkeypatch.setattr(fakes, "DockServer", Restartable)
    monkeypatch.setattr(Restartable, "made", made := [])
    monkeypatch.setattr(feeding, "LOOK_AGAIN_S", 0.1)
    monkeypatch.setattr(job_module, "LOOK_AGAIN_S", 0.2)

    def before(run):
        feed = run.feeder.put

        async def put_and_lose(batch, issues, replaces=()):
            await feed(batch, issues, replaces)
            if batch == 1 and len(made) == 1:
                await asyncio.sleep(0.01)
                await asyncio.to_thread(made[-1].empty_again, len(made))
                run.job.spawn(run.issue_again())

        run.feeder.put = put_and_lose

    rollouts = [FakeRollout(delay_s=0.3), FakeRollout(delay_s=0.2)]
    try:
        out = run_loops(
            config(replicas=2, **MODES[mode]), tmp_path, prompts_of(100, 4), rollouts=rollouts, before=before
        )
    finally:
        for server in made:
            server.close()
    window = once(out)
    assert len(made) == 2 and window.dropped["dock_lost"] >= 2
    assert window.trained == 48 == window.issued - window.dropped["dock_lost"]
