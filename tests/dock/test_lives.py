"""A pair whose memory is gone or damaged: it says so, and clients go on with an empty one under its number."""

import os
from pathlib import Path

import numpy as np
import pytest

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import ColumnSpec, TaskSpec
from mindspeed_asyncflow.dock.memory import journal_path
from mindspeed_asyncflow.dock.pair import PairClient
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.dock.table import pair_numbers
from mindspeed_asyncflow.errors import ClaimLost, DockError, DockMemoryLost, StaleHandle, WorkerLost

COLUMNS = [ColumnSpec("prompt", "int32", "ragged", shared=True, tokens=True), ColumnSpec("x", "float32")]
TASKS = [TaskSpec("make", ("prompt",))]


@pytest.fixture
def start(tmp_path):
    made = []

    def make(path=None, **how):
        path = path or f"/dev/shm/asyncflow-{os.getpid()}-test-{tmp_path.name}"
        made.append(DockServer(COLUMNS, TASKS, arena_mb=2, secret="s", arena_path=path, **how).start())
        return made[-1]

    yield make
    for server in made:
        server.close()


def end(server):
    """As a process that is killed: what it has in memory stays. Returns path and port."""
    server._stop = True
    server._wake_send.send(b"x")
    server._thread.join(10)
    where = server.arena_path, int(server.address.rpartition(":")[2])
    server._listener.close()
    server._local_listener.close()
    return where


def put(dock, *groups):
    return np.concatenate(
        dock.put("p", list(groups), values={"prompt": [np.arange(g + 3, dtype=np.int32) for g in groups]})
    )


@pytest.mark.parametrize("damage", ["no arena", "no journal", "a byte of the journal", "another arena"])
def test_memory_that_is_gone_or_damaged_is_named(start, damage):
    server = start()
    with DockClient(server.address, "s") as dock:
        put(dock, 1, 2)
        put(dock, 3)
    path, port = end(server)
    journal = Path(journal_path(path))
    if damage == "no arena":
        os.unlink(path)
    elif damage == "no journal":
        journal.unlink()
    elif damage == "another arena":
        Path(path).write_bytes(bytes(2 << 20))
    else:
        raw = bytearray(journal.read_bytes())
        raw[80] ^= 1
        journal.write_bytes(raw)
    with pytest.raises(DockMemoryLost, match=path):
        start(path, port=port, restart=True)


@pytest.mark.parametrize("mapped", [True, False])
def test_clients_go_on_with_an_empty_pair_and_nothing_of_the_old_one_fits_it(start, mapped):
    server = start()
    with DockClient(server.address, "s", map_arena=mapped) as dock:
        rows = put(dock, 1, 2, 3)
        claim = dock.claim("make", 2, partition="p", worker="w")
        path, port = end(server)
        os.unlink(path)
        os.unlink(journal_path(path))
        server = start(path, port=port, life=1)
        for refused in (lambda: dock.read(rows, ["prompt"]), lambda: dock.read(rows[:1], ["prompt"])):
            with pytest.raises(StaleHandle):
                refused()
        assert dock.missing("p", [1, 2, 3]) == [1, 2, 3]
        new = put(dock, 2, 5)
        assert not set(new.tolist()) & set(rows.tolist()) and dock.missing("p", [1, 2, 5]) == [1]
        again = dock.claim("make", 5, partition="p", worker="w")
        assert again.claim_id != claim.claim_id
        with pytest.raises(ClaimLost):
            dock.write(new[:1], {"x": [1.0]}, claim_id=claim.claim_id)
        with pytest.raises(StaleHandle):
            dock.write(claim.rows, {"x": [0.0, 0.0]}, claim_id=again.claim_id)
        dock.write(again.rows, {"x": [2.0, 5.0]}, claim_id=again.claim_id, done=True)
        end(server)
        start(path, port=port, restart=True)
        assert dock.read(new, ["x"])["x"].tolist() == [2.0, 5.0]


def test_an_empty_pair_that_is_no_later_life_of_the_old_one_is_refused(start):
    server = start()
    with DockClient(server.address, "s", restart_s=0.2) as dock:
        rows = put(dock, 1)
        path, port = end(server)
        start(f"{path}-other", port=port)
        for _ in range(2):
            with pytest.raises(WorkerLost, match="replaced by another one"):
                dock.read(rows, ["prompt"])


def test_numbers_last_for_31_lives(start):
    with pytest.raises(DockError, match="life"):
        start(life=32)


def test_in_a_dock_of_several_pairs_the_others_go_on_and_the_empty_one_takes_part_again(start, tmp_path):
    servers = [start(pair=0), start(f"/dev/shm/asyncflow-{os.getpid()}-test-{tmp_path.name}-1", pair=1)]
    addresses = [server.address for server in servers]
    with DockClient(addresses, "s", home=0) as dock, DockClient(addresses, "s", home=1) as other:
        rows = put(dock, *range(8))
        lost = [g for g, row in enumerate(rows.tolist()) if pair_numbers(np.array([row]))[0] == 1]
        assert 0 < len(lost) < 8
        path, port = end(servers[1])
        os.unlink(path)
        os.unlink(journal_path(path))
        start(path, port=port, life=1, pair=1)
        with PairClient(addresses[1], "s") as pair:
            pair.join(1, addresses)
        assert dock.missing("p", range(8)) == other.missing("p", range(8)) == lost
        put(other, *lost)
        got: list[int] = []
        while len(got) < 8:
            claim = other.claim("make", 8, partition="p", worker="w", timeout_s=5.0)
            got += claim.group_ids.tolist()
            other.write(claim.rows, {"x": np.zeros(len(claim.rows), np.float32)}, claim_id=claim.claim_id, done=True)
        assert sorted(got) == list(range(8)) and dock.stats()["pairs"] == 2
