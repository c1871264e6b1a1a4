"""Checkpoints that are late, given up, or of another run, in a session whose workers are stand-ins."""

import asyncio
import contextlib
import json
import threading
from types import SimpleNamespace

import pytest

from mindspeed_asyncflow.config.load import dump_resolved
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import DeadlineExceeded, Unanswered, WorkerReplaced
from mindspeed_asyncflow.observe import checkpoints
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service import saving
from mindspeed_asyncflow.service.saving import Saving
from mindspeed_asyncflow.workflow.events import NoEvents
from mindspeed_asyncflow.workflow.turns import NoTurns

WAIT_S = 20.0  # of threads, which come at once


class Rank:
    name = "trainer0"

    def __init__(self, folder):
        self.folder, self.loaded = folder, []

    async def begin_save(self, partial):
        return True

    async def finish_save(self):
        return []

    async def load_checkpoint(self, folder):
        self.loaded.append(folder)


class Session(Saving):
    """Real checkpoints of a dock and a driver that have nothing. `cuts`: what each cut of the dock does."""

    def __init__(self, path, *cuts, checkpoint=None, **settings):
        self.set(**settings)
        self.folder = RunFolder.create_at(path, dump_resolved(self.config), checkpoint)
        self.resumed, self._writing, self._threads = saving.Resumed(), None, set()
        self._clean = {"stream": {}, "recorder": {}}
        self.cuts, self.events, self.turns = list(cuts), NoEvents(), NoTurns()
        self.run = SimpleNamespace(job=SimpleNamespace(progressed=lambda: None))
        self.trainers, self.critics = [Rank(self.folder)], []
        self.stream = self.recorder = SimpleNamespace(
            restore=lambda state: None, metrics=SimpleNamespace(closed=contextlib.nullcontext), facts=dict
        )

    def set(self, **settings):
        self.config = Config.model_validate({"checkpoint": {"timeout_s": 30, "keep": 1} | settings})

    def _cut_dock(self, folder):
        if self.cuts:
            self.cuts.pop(0)()
        folder.mkdir()
        (folder / "rows").write_text("")

    def _cut(self, step):
        run = {"book": {"groups": []}, "recorder": {}}
        return json.dumps({"version": step, "run": run, "stream": {}, "probe": [], "ledger": 0} | self.marks())

    def marks(self):
        return {"marks": self.folder.marks()}

    def _refill_dock(self, cut, wanted):
        return {}

    def names(self):
        return sorted(p.name for p in self.folder.checkpoints.iterdir())


def failing(error):
    def cut():
        raise error

    return cut


@pytest.mark.parametrize(
    "error", [Unanswered("dock0 said nothing"), WorkerReplaced("dock0 died"), DeadlineExceeded("")]
)
def test_a_dock_that_cannot_be_written_in_time_is_a_warning_but_at_the_end(tmp_path, caplog, error):
    async def main():
        session = Session(tmp_path / "run", *[failing(error)] * 4)
        await session.save(2)
        assert "no checkpoint of step 2, the run goes on without it" in caplog.text
        with pytest.raises(type(error)):
            await session.save(4, last=True)

    asyncio.run(main())


def test_a_dock_pair_that_is_started_again_in_the_cut_costs_no_checkpoint(tmp_path):
    async def main():
        session = Session(tmp_path / "run", failing(WorkerReplaced("dock0 died")))
        await session.save(4)
        await session.written()
        assert session.names() == ["latest", "step_000004"]

    asyncio.run(main())


def test_a_checkpoint_that_takes_too_long_is_a_warning_and_the_next_one_waits_for_its_thread(tmp_path, caplog):
    go, ended = threading.Event(), []

    def slow():
        assert go.wait(WAIT_S)
        ended.append(True)

    async def main():
        session = Session(tmp_path / "run", slow, lambda: ended.append(len(ended)), timeout_s=0.05)
        await session.save(2)
        assert "waited 0.05 s (checkpoint.timeout_s) for the dock to be written" in caplog.text and not ended
        session.set()
        asyncio.get_running_loop().call_later(0.05, go.set)
        await session.save(4)
        await session.written()
        assert ended == [True, 1] and session.names() == ["latest", "step_000004"]

    asyncio.run(main())


def test_a_checkpoint_that_is_being_completed_when_it_is_given_up_is_the_newest_afterwards(tmp_path, monkeypatch):
    """Else it would remove the one that was chosen before."""
    go, at = threading.Event(), threading.Event()
    complete = checkpoints.complete

    def slow(*args, **kwargs):
        if kwargs["step"] == 6:
            at.set()
            assert go.wait(WAIT_S)
        return complete(*args, **kwargs)

    monkeypatch.setattr(checkpoints, "complete", slow)

    async def main():
        session = Session(tmp_path / "run")
        await session.save(4)
        await session.save(6)
        assert await asyncio.to_thread(at.wait, WAIT_S)
        asyncio.get_running_loop().call_later(0.05, go.set)
        await session.abandon()
        newest = checkpoints.newest_complete(session.folder.checkpoints)
        assert newest is not None and newest.name == "step_000006"
        await session.restore(newest)
        assert session.trainers[0].loaded == [str(newest)] and session.names() == ["latest", "step_000006"]

    asyncio.run(main())


def test_who_goes_on_sets_aside_what_was_passed_over_and_removes_what_is_undone_or_too_much(tmp_path):
    async def main():
        session = Session(tmp_path / "run", keep=9)
        for step in (1, 2, 3, 4):
            await session.save(step)
        await session.written()
        root = session.folder.checkpoints
        (root / "step_000004" / "state.json").unlink()
        session.set(keep=2)
        await session.restore(root / "step_000003")
        assert [name[: len("damaged_step_000004")] for name in session.names()] == [
            "damaged_step_000004", "latest", "step_000002", "step_000003"
        ]  # fmt: skip
        await session.restore(root / "step_000002", undo=True)
        assert session.names()[1:] == ["latest", "step_000002"]

    asyncio.run(main())


def test_lines_of_a_run_begun_elsewhere_are_not_measured_by_the_files_of_the_other(tmp_path):
    async def main():
        other = Session(tmp_path / "other")
        other.folder.metrics.write_text("step 0\nstep 1\n")
        await other.save(2)
        await other.written()
        checkpoint = other.folder.checkpoints / "step_000002"
        new = Session(tmp_path / "new", checkpoint=checkpoint)
        new.folder.metrics.write_text("step 2\n")  # of a driver that was killed before its first checkpoint
        await new.restore(checkpoint)
        assert new.folder.metrics.read_text() == ""

    asyncio.run(main())
