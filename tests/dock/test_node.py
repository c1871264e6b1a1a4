"""The verbs of one controller/warehouse pair without sockets: waiting for bytes, and thousands of batches."""

import os

import numpy as np
import pytest

from mindspeed_asyncflow.dock.arena import GRANULE, Arena
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, ColumnSpec, Schema, grpo_tasks
from mindspeed_asyncflow.dock.node import DockNode
from mindspeed_asyncflow.dock.wire import Message, Verb
from mindspeed_asyncflow.errors import DeadlineExceeded, DockError, StaleHandle

ONE_BYTE = ColumnSpec("x", "uint8", "ragged").parts[0]


@pytest.fixture
def node(tmp_path):
    arena = Arena.create(str(tmp_path / "arena"), 1 << 20)
    yield DockNode(Schema(GRPO_COLUMNS, grpo_tasks(False)), arena, 10.0)
    arena.unlink()


def put(group: int, tokens: int = 16, rows: int = 4, timeout_s: float = 5.0) -> Message:
    return Message({
        "partition": "train", "group_ids": np.array([group]), "sizes": np.array([rows]), "counts": np.array([rows]),
        "members": np.arange(rows, dtype=np.int32), "columns": ["prompt_ids"], "reservation": 0,
        "timeout_s": timeout_s, "lengths": np.array([tokens]), "data": np.full(tokens, group, np.int32).view(np.uint8),
    })  # fmt: skip


def write(rows: np.ndarray, tokens: int, timeout_s: float = 5.0) -> Message:
    return Message({
        "rows": rows, "columns": ["response_ids"], "reservation": 0, "timeout_s": timeout_s, "done": False,
        "lengths": np.full(len(rows), tokens), "data": np.zeros(len(rows) * tokens * 4, np.uint8),
    })  # fmt: skip


@pytest.mark.slow
def test_thousands_of_batches_recycle_one_arena_and_leave_it_whole(node):
    """No segment per batch, no byte and no free run lost, whatever the order in which rows go."""
    before, rng, alive = set(os.listdir("/dev/shm")), np.random.default_rng(0), np.empty(0, np.int64)
    for i in range(2000):
        rows = node.handle(Verb.PUT, put(i, int(rng.integers(1, 200))), None, i, 0.0)["rows"]
        assert node.handle(Verb.WRITE, write(rows, int(rng.integers(0, 100))), None, i, 0.0) == {}
        alive = np.concatenate((alive, rows))
        if len(alive) > 200:
            gone = rng.permutation(len(alive))[:150]
            node.handle(Verb.FREE, Message(rows=alive[gone]), None, i, 0.0)
            alive = np.delete(alive, gone)
    node.handle(Verb.FREE, Message(rows=alive), None, 0, 0.0)
    house = node.warehouse
    assert house.used_bytes == house.payload_bytes == 0
    assert house.reserve([ONE_BYTE], [np.array([house.capacity_bytes])]) == [(0, 0, 1, GRANULE)]
    assert not [name for name in set(os.listdir("/dev/shm")) - before if f"-{os.getpid()}-" in name]
    assert node.controller.partitions["train"].rows.capacity < 1000, "slots are recycled too"


def test_waiting_writes_and_puts_are_served_in_their_order_when_bytes_are_freed(node):
    half = (1 << 20) // 8
    first = node.handle(Verb.PUT, put(1, half), None, "a", 0.0)["rows"]
    assert node.handle(Verb.PUT, put(2, half), None, "b", 0.0) is None
    assert node.handle(Verb.WRITE, write(first, half // 4 + 1000), None, "w", 0.0) is None
    assert node.next_deadline() == 5.0
    node.handle(Verb.FREE, Message(rows=first), None, "d", 1.0)
    outcomes = dict(node.take_outcomes())
    assert list(outcomes) == ["b", "w"] and len(outcomes["b"]["rows"]) == 4
    assert isinstance(outcomes["w"], StaleHandle), "its row was freed while it waited"
    assert node.back_pressure_s == 2.0


def test_a_wait_for_bytes_ends_with_what_is_in_use(node):
    node.handle(Verb.PUT, put(1, 180_000), None, "a", 0.0)
    assert node.handle(Verb.PUT, put(2, 180_000), None, "b", 0.0) is None
    node.tick(4.9)
    assert not node.take_outcomes()
    node.tick(5.0)
    [(key, error)] = node.take_outcomes()
    assert key == "b" and isinstance(error, DeadlineExceeded)
    assert "waited 5.0 s for 720000 free bytes" in str(error) and "by 4 rows" in str(error)


def test_a_reservation_serves_only_the_connection_and_size_that_it_was_made_for(node):
    rows = node.handle(Verb.PUT, put(1), None, "a", 0.0)["rows"]
    used = node.warehouse.used_bytes
    for owner, handles in (("other", rows), ("mine", rows[:3])):
        reserve = Message(write(rows, 16) | {"put": False, "rows": 4, "groups": 4, "timeout_s": 0.0})
        number = node.handle(Verb.RESERVE, reserve, "mine", "b", 0.0)["reservation"]
        with pytest.raises(DockError, match=r"not reserved|reserved for 4 rows"):
            node.handle(Verb.WRITE, Message(write(handles, 16) | {"reservation": number}), owner, "c", 0.0)
        node.connection_lost("mine", 0.0)
        assert node.warehouse.used_bytes == used


def test_a_refused_call_leaves_no_bytes_behind(node):
    rows = node.handle(Verb.PUT, put(1), None, "a", 0.0)["rows"]
    node.handle(Verb.WRITE, write(rows[:1], 5), None, "b", 0.0)
    used = node.warehouse.used_bytes
    with pytest.raises(DockError, match="has a result already"):
        node.handle(Verb.WRITE, write(rows, 6), None, "c", 0.0)
    assert node.warehouse.used_bytes == used
