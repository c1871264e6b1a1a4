"""A rank of the training group dies or freezes, and the run goes on with the replicas that it had."""

import asyncio
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_asyncflow.config.faults import FaultsConfig
from mindspeed_asyncflow.errors import EngineError, StaleHandle, WorkerLost
from mindspeed_asyncflow.service import recovery
from mindspeed_asyncflow.service.recovery import Recovery
from mindspeed_asyncflow.service.supervision import Supervision
from tests.service.test_launch import DEFAULT, SMALL, Job, balanced, finished, metrics

PATIENCE_S = 400  # of a machine that others use


class Rank:
    """Lives until `end`."""

    def __init__(self, name):
        self.name, self._died = name, asyncio.get_running_loop().create_future()

    async def watch(self, heartbeat_s):
        await asyncio.shield(self._died)

    def end(self):
        self._died.set_exception(WorkerLost(f"{self.name} died"))


class Session:
    """`rounds` say what each `train` does; everything that is done to the session is written down."""

    def __init__(self, *rounds, restarts=3, others=True):
        faults = FaultsConfig(max_restarts=restarts)
        self.config = SimpleNamespace(faults=faults)
        self.notes, self.done, self.rounds = [], [], list(rounds)
        self.supervision = Supervision(faults, lambda kind, **fields: self.notes.append((kind, fields["component"])))
        self.run, self.dock, self.references = "first run", self, []
        self.sync = SimpleNamespace(replicas=[None])
        self.replicas, self.folder = SimpleNamespace(up={}, remotes={0: None} if others else {}), self
        self.ranks = [Rank("trainer0"), Rank("trainer1"), Rank("rollout1")]

    def group(self):
        return self.ranks

    async def train(self):
        await self.rounds.pop(0)(self)

    def end_group(self):
        self.done.append("end")

    async def start_group(self):
        self.ranks = [Rank("trainer0"), Rank("trainer1")]
        self.done.append("start")

    async def restore(self, folder):
        self.done.append(("restore", folder))

    async def abandon(self):
        self.done.append("abandon")

    async def prepare(self, say):
        self.done.append("prepare")

    async def forget_worker(self, worker):
        return 0

    async def within(self, work, whom):
        return await work


async def ends(session):
    pass


async def loses_a_rank(session):
    session.ranks[1].end()
    await asyncio.sleep(60)


async def loses_a_replica_on_a_device_of_a_rank(session):
    session.ranks[2].end()
    await asyncio.sleep(0.1)


async def hears_of_it_first(session):
    """The neighbour of the dead rank reports a broken connection before the death is known."""
    asyncio.get_running_loop().call_later(0.05, session.ranks[0].end)
    raise RuntimeError("connection closed by peer")


async def misses_its_rows(session):
    raise StaleHandle("row 7 is of an earlier life of pair 0")


async def fails(session):
    raise EngineError("not finite")


@pytest.fixture(autouse=True)
def checkpoint(monkeypatch):
    """One that is written to the end while the group is lost becomes the newest, and the one before it may go."""

    def newest(session):
        return Path("newest" if "abandon" in session.done else "removed")

    monkeypatch.setattr(recovery.resuming, "newest", newest)
    monkeypatch.setattr(recovery, "NOTICE_S", 0.5)


def run(*rounds, **how):
    async def main():
        session = Session(*rounds, **how)
        error = None
        try:
            await Recovery(session, lambda words: None).train()
        except Exception as found:  # what the test asks for
            error = found
        return session, error

    return asyncio.run(main())


@pytest.mark.parametrize(("fault", "name"), [(loses_a_rank, "trainer1"), (hears_of_it_first, "trainer0")])
def test_a_lost_rank_starts_the_group_again_from_the_newest_checkpoint(fault, name):
    session, error = run(fault, ends)
    assert error is None and not session.rounds
    assert session.done == ["end", "start", "abandon", ("restore", Path("newest")), "prepare"]
    assert session.notes == [("lost", name), ("recovered", name)]


def test_rows_that_a_dock_pair_loses_under_a_step_start_the_group_again():
    session, error = run(misses_its_rows, ends)
    assert error is None and session.done[-2:] == [("restore", Path("newest")), "prepare"]
    assert session.notes == [("lost", "trainer"), ("recovered", "trainer")]


@pytest.mark.parametrize("others", [True, False])
def test_a_replica_on_a_device_of_a_rank_is_missed_where_there_are_no_others(others):
    session, error = run(loses_a_replica_on_a_device_of_a_rank, ends, others=others)
    assert error is None
    assert session.notes == ([] if others else [("lost", "rollout1"), ("recovered", "rollout1")])


def test_an_error_while_all_ranks_live_ends_the_run():
    session, error = run(fails)
    assert isinstance(error, EngineError) and session.done == []


def test_a_rank_that_is_lost_too_often_ends_the_run_which_keeps_what_it_has():
    session, error = run(loses_a_rank, loses_a_rank, restarts=1)
    assert isinstance(error, WorkerLost) and "faults.max_restarts" in str(error)
    assert session.done.count("start") == 1


@pytest.mark.slow
def test_training_goes_on_after_a_killed_and_a_frozen_rank_while_the_other_processes_stay(tmp_path):
    """The first fault comes before any checkpoint, the second after one; two ranks, which wait for each other."""
    settings = [*SMALL, "rollout.engine=reference", "trainer.data_parallel=2", "evaluation.prompts=0"]
    settings += ["workflow.groups_per_step=4", "trainer.steps=60", "trainer.save_every=40", "faults.heartbeat_s=6"]
    job = Job(tmp_path / "runs", DEFAULT, *settings)
    job.wait_for("step 1/", PATIENCE_S)
    first = processes(job)
    os.kill(first["trainer0"], signal.SIGKILL)
    job.wait_for("go on from version 0", PATIENCE_S)
    job.wait_for("checkpoint of step 40", PATIENCE_S)
    second = processes(job)
    os.kill(second["trainer1"], signal.SIGSTOP)
    job.wait_for("go on from checkpoint step_000040", PATIENCE_S)
    third = processes(job)
    summary = finished(job)
    assert summary["steps"] == 60 and summary["samples_trained"] == 60 * 4 * 8 and balanced(summary)
    assert [row["step"] for row in metrics(job)] == list(range(60))
    for before, after in ((first, second), (second, third)):
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {"trainer0", "trainer1"}
    assert job.leftovers() == []


def processes(job):
    found = json.loads((job.folder / "processes.json").read_text())
    return {name: entry["pid"] for name, entry in found.items()}
