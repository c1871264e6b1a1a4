"""Wrong arguments are answered at once, by name and value, and disturb nobody."""

import os
import threading
import time

import numpy as np
import pytest

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import ColumnSpec, TaskSpec
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.dock.wire import Verb
from mindspeed_asyncflow.errors import DeadlineExceeded, DockError

SECRET = "arguments"
COLUMNS = (ColumnSpec("prompt", "int32", "ragged", shared=True), ColumnSpec("y", "float32"))
TASKS = (TaskSpec("use", ("y",)), TaskSpec("make", ("prompt",)))


@pytest.fixture(params=[1, 2])
def dock(request):
    """A client of one pair, or of two, with one row of the group 1 in partition p."""
    servers = [DockServer(COLUMNS, TASKS, arena_mb=1, secret=SECRET).start() for _ in range(request.param)]
    client = DockClient([s.address for s in servers], SECRET, wait_s=5.0)
    client.put("p", [1], values={"prompt": [[5]], "y": [1.0]})
    yield client
    client.close()
    for server in servers:
        server.close()
        assert server.failure is None


CALLS = {
    "count as text": (lambda d: claim(d, count="3"), r"count .*'3'"),
    "half a row": (lambda d: claim(d, count=1.5), r"count .*1\.5"),
    "no rows": (lambda d: claim(d, count=0), "count .*0"),
    "more than count": (lambda d: claim(d, count=2, at_least=3), "at_least .* from 1 to 2, got 3"),
    "at least none": (lambda d: claim(d, count=2, at_least=0), "at_least .*0"),
    "no worker": (lambda d: claim(d, worker=None), "worker .*None"),
    "long partition": (lambda d: claim(d, partition="p" * 1000), "1000 characters"),
    "version as text": (lambda d: claim(d, min_version="a"), "min_version .*'a'"),
    "age before now": (lambda d: claim(d, max_age_s=-1), "max_age_s .*-1"),
    "age unknown": (lambda d: claim(d, max_age_s=float("nan")), "max_age_s .*nan"),
    "endless": (lambda d: claim(d, timeout_s=float("inf")), "timeout_s .*inf"),
    "no groups": (lambda d: claim(d, unit="groups", group_ids=[]), "group_ids .*at least one"),
    "rank without team": (lambda d: claim(d, ranks=2), "team="),
    "columns as text": (lambda d: claim(d, columns="y"), "columns .*'y'"),
    "task without name": (lambda d: d.add_task("", ["y"]), "name of 1 to"),
    "task without columns": (lambda d: d.add_task("t", []), "must read a column"),
    "task from letters": (lambda d: d.add_task("t", "y"), "list of names"),
    "float ids": (lambda d: d.put("p", [1.5], values={"prompt": [[5]], "y": [1.0]}), "group_ids .*float64"),
    "huge member": (lambda d: put(d, 2, members=[1 << 32]), "members must fit into int32"),
    "negative member": (lambda d: put(d, 2, members=[-1]), "count from 0, got -1"),
    "member twice": (lambda d: put(d, 2, size=2, members=[0, 0]), "member 0 of group 2 twice"),
    "huge version": (lambda d: put(d, 2, versions=([1 << 31], [1 << 31])), "versions must fit into int32"),
    "half a version": (lambda d: put(d, 2, versions=([1.9], [1.9])), "versions .*float64"),
    "versions of fewer rows": (lambda d: put(d, 2, versions=([], [])), "one entry per row"),
    "done without claim": (lambda d: d.write(row(d), {"y": [1.0]}, done=True), "claim_id"),
    "rows as text": (lambda d: d.read(["a"], ["y"]), "rows .*whole numbers"),
    "rows as matrix": (lambda d: d.read(np.zeros((2, 2), np.int64), ["y"]), "rows .*whole numbers"),
    "claim as text": (lambda d: d.release("a"), "claim_id .*'a'"),
    "nobody": (lambda d: d.forget_worker(None), "worker .*None"),
}  # fmt: skip


def claim(dock, count=1, **how):
    return dock.claim("use", count, **{"partition": "p", "worker": "w", "timeout_s": 0.0} | how)


def put(dock, group, size=1, members=None, versions=None):
    values = {"prompt": [[5]], "y": [1.0] * size}
    return dock.put("p", [group], [size], [size], members, values, versions=versions)


def row(dock):
    return dock.put("q", [1], values={"prompt": [[5]], "y": [1.0]})[0]


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_argument_is_named_with_its_value_at_once_and_changes_nothing(dock, case):
    call, message = CALLS[case]
    before = dock.stats()["partitions"]["p"]
    began = time.monotonic()
    with pytest.raises(DockError, match=message):
        call(dock)
    assert time.monotonic() - began < 1.0
    assert dock.stats()["partitions"]["p"] == before
    assert len(claim(dock).rows) == 1


def test_a_whole_frame_with_a_wrong_value_is_answered_and_the_connection_goes_on(dock):
    pair = next(dock.pairs())
    with pytest.raises(DockError, match="worker"):
        pair.call(Verb.FORGET, {"worker": 3})
    assert pair.stats()["pairs"] == len(dock.addresses)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"max_rows": -1}, "max_rows"),
        ({"pair": 256}, "pair"),
        ({"host": "0.0.0.0", "secret": ""}, "needs a secret"),
    ],
)
def test_a_server_that_cannot_work_is_not_started(settings, message):
    with pytest.raises(DockError, match=message):
        DockServer(COLUMNS, TASKS, arena_mb=1, **{"secret": SECRET} | settings)


def test_closing_a_client_ends_its_waiting_claims_and_takes_no_row(dock):
    ended = threading.Event()
    other = DockClient(dock.addresses, SECRET, wait_s=5.0)

    def wait() -> None:
        with pytest.raises(DockError, match="closed"):
            other.claim("use", 1, partition="late", worker="w", timeout_s=5.0)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    other.close()
    assert ended.wait(2.0)
    thread.join()
    dock.put("late", [1], values={"prompt": [[5]], "y": [1.0]})
    assert len(claim(dock, partition="late").rows) == 1


def test_a_client_made_before_a_fork_is_refused_in_the_child(dock):
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            put(dock, 9)
            said = "it was carried out"
        except DockError as error:
            said = str(error)
        os.write(send, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "before a fork" in os.read(receive, 1000).decode()
    os.close(receive)
    os.close(send)


def test_a_deadline_of_no_wait_is_kept(dock):
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        claim(dock, partition="nothing")
    assert time.monotonic() - began < 1.0
