"""Members that come later belong to the group that is there, or are refused."""

import numpy as np
import pytest

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import ColumnSpec, TaskSpec
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import DockError, PlatformError

SECRET = "joining"
COLUMNS = (ColumnSpec("prompt", "int32", "ragged", shared=True), ColumnSpec("y", "float32"))
TASKS = (TaskSpec("make", ("prompt",)),)


@pytest.fixture
def dock():
    with DockServer(COLUMNS, TASKS, arena_mb=1, secret=SECRET) as server, DockClient(server.address, SECRET) as client:
        yield client


def put(dock, members, prompt=(5,)):
    values = {} if prompt is None else {"prompt": [np.array(prompt, np.int32)]}
    values["y"] = np.zeros(len(members), np.float32)
    return dock.put("p", [1], [3], [len(members)], members, values)[0]


def test_members_without_the_shared_columns_of_their_group_are_refused_and_the_group_stays_servable(dock):
    put(dock, [0])
    with pytest.raises(DockError, match="group 1 has shared columns"):
        put(dock, [1, 2], prompt=None)
    put(dock, [1, 2])
    assert len(dock.claim("make", 1, partition="p", worker="w", unit="groups").rows) == 3


def test_a_member_that_is_there_is_refused_until_it_is_gone(dock):
    put(dock, [0])
    rows = put(dock, [1])
    with pytest.raises(DockError, match="member 1 of a group is there already"):
        put(dock, [1])
    dock.free(rows)
    assert dock.stats()["partitions"]["p"]["rows"] == 1


def test_rows_without_groups_never_meet_an_id_that_is_taken(dock, tmp_path):
    for _ in range(3):
        dock.put("free", values={"y": np.zeros(4, np.float32)})
    dock.snapshot(tmp_path / "cut")
    with DockServer(COLUMNS, TASKS, arena_mb=1, secret=SECRET) as server, DockClient(server.address, SECRET) as other:
        other.restore(tmp_path / "cut")
        for _ in range(3):
            assert len(other.put("free", values={"y": np.zeros(5, np.float32)})[0]) == 5
        assert other.stats()["partitions"]["free"]["rows"] == 12 + 15


def test_the_arena_of_a_pair_that_runs_is_not_taken_over(tmp_path):
    path = str(tmp_path / "arena")
    with (
        DockServer(COLUMNS, TASKS, arena_mb=1, secret=SECRET, arena_path=path) as server,
        DockClient(server.address, SECRET) as client,
    ):
        client.put("p", values={"y": np.zeros(3, np.float32)})
        with pytest.raises(PlatformError, match="in use by a pair that runs"):
            DockServer(COLUMNS, TASKS, secret=SECRET, arena_path=path, restart=True)
        client.put("p", values={"y": np.zeros(4, np.float32)})
        assert client.stats()["partitions"]["p"]["rows"] == 7
