"""Files of ranks come to the driver's checkpoint, also where no disk is shared."""

import asyncio

import pytest

from mindspeed_asyncflow.errors import CheckpointError
from mindspeed_asyncflow.observe import checkpoints
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.workflow import state_keeping


class Engine:
    """Writes one file."""

    def __init__(self, rank, content):
        self.rank, self.content, self.loaded = rank, content, ""

    def begin_save(self, folder):
        self.folder = state_keeping.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def finish_save(self):
        (self.folder / f"rank{self.rank}").write_bytes(self.content)
        return [file for file in checkpoints.sums(self.folder) if file.name == f"rank{self.rank}"]

    def load_checkpoint(self, folder):
        self.loaded = folder


class Worker(state_keeping.KeepsState):
    part, lane = "trainer", "train"

    def __init__(self, tmp_path, rank, content):
        self.engine, self.name, self.tracer = Engine(rank, content), f"trainer{rank}", Tracer(tmp_path, "test")

    def _engine(self):
        return self.engine


class Called:
    """A worker elsewhere."""

    def __init__(self, worker):
        self._worker = worker

    def __getattr__(self, name):
        async def call(*args):
            return getattr(self._worker, name)(*args)

        return call


@pytest.fixture
def workers(tmp_path, monkeypatch):
    monkeypatch.setattr(state_keeping, "CHUNK", 4)
    return [Worker(tmp_path / "trace", rank, bytes(range(10 + rank))) for rank in range(2)]


def test_a_rank_that_sees_the_folder_writes_into_it(tmp_path, workers):
    partial = checkpoints.begin(tmp_path, 3)
    assert [w.begin_save(str(partial)) for w in workers] == [True, True]
    files = [file for w in workers for file in w.finish_save()]
    assert files == checkpoints.sums(partial)
    with pytest.raises(CheckpointError, match="removes nothing"):
        workers[0].drop_saved()


def test_files_of_ranks_elsewhere_are_fetched_whole_and_leave_nothing_there(tmp_path, workers):
    """Both ranks are on one host, on which the driver's path is another disk."""
    here, there = tmp_path / "here", tmp_path / "there"
    partial = checkpoints.begin(here, 3)
    elsewhere = str(there / partial.name)
    (there / ".step_000001-77.away").mkdir(parents=True)  # of a run that was killed
    assert [w.begin_save(elsewhere) for w in workers] == [False, False]
    files = [w.finish_save() for w in workers]

    async def fetch():
        for worker, of_rank in zip(workers, files):
            await state_keeping.bring(partial, Called(worker), of_rank)

    asyncio.run(fetch())
    folder = checkpoints.complete(partial, [f for of in files for f in of], step=3, version=3, config="")
    assert checkpoints.verify(folder).step == 3, "sizes and checksums are those that the ranks named"
    assert list(there.iterdir()) == []


def test_every_kind_of_rank_loads_its_own_part(tmp_path, workers):
    workers[1].load_checkpoint(str(tmp_path / "step_000003"))
    assert workers[1].engine.loaded == str(tmp_path / "step_000003" / "trainer")
