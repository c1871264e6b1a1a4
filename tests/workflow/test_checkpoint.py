"""What a restored dock has of the groups that the driver's book knows."""

import secrets

import numpy as np
import pytest

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.records import PromptRow
from mindspeed_asyncflow.workflow.checkpoint import Held, settle
from mindspeed_asyncflow.workflow.partial import PARTIAL_COLUMNS


@pytest.fixture(params=[1, 3])
def dock(request):
    secret = secrets.token_bytes(8)
    servers = [
        DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=2, lease_s=30.0, secret=secret, pair=pair).start()
        for pair in range(request.param)
    ]
    with DockClient([server.address for server in servers], secret, 5.0) as client:
        yield client
    for server in servers:
        server.close()


def put(dock, group):
    rows = [PromptRow(group, m, 2, np.array([group, 1], np.int32), str(group), 0, group, "{}") for m in range(2)]
    return dock.put_groups("train", [rows])[0]


def answered(dock, rows, version):
    n = len(rows)
    spans = [np.array([[version, 0, 2]], np.int32)] * n
    values = {
        "response_ids": [np.array([7, 8], np.int32)] * n,
        "rollout_logprobs": [np.array([-1.0, -2.0], np.float32)] * n,
        "response_spans": spans,
        "finish": np.zeros(n, np.uint8),
    }
    versions = (np.full(n, version, np.int32), np.full(n, version + 1, np.int32))
    dock.write(rows, values, versions=versions)


def scored(dock, rows):
    ones = np.ones(len(rows), np.float32)
    dock.write(rows, {"score": ones, "reward": ones, "advantage": ones})


def test_every_group_goes_on_with_what_the_dock_has_or_begins_again(dock):
    whole, torn, begun, _, _ = (put(dock, g) for g in range(5))
    for rows in (whole, torn):
        answered(dock, rows, version=3)
    scored(dock, whole)
    scored(dock, torn[:1])
    parts = [np.array([5], np.int32)], [np.array([-1.0], np.float32)], [np.array([[2, 0, 1]], np.int32)]
    span = (np.array([2], np.int32), np.array([2], np.int32))
    dock.write(begun[:1], dict(zip(PARTIAL_COLUMNS, parts)), versions=span)
    held = settle(dock, "train", {0, 1, 2, 3})
    assert held == {0: Held(2, 3, ((0, 1.0), (1, 1.0))), 2: Held(2, 2), 3: Held(2)}
    put(dock, 1)  # as a run that goes on does with what is missing
    claim = dock.claim("rollout", 9, partition="train", worker="w", unit="rows", timeout_s=1.0)
    found = list(claim.group_ids)
    while len(found) < 6:
        found += list(dock.claim("rollout", 9, partition="train", worker="w", unit="rows", timeout_s=1.0).group_ids)
    assert sorted(found) == [1, 1, 2, 2, 3, 3]
    trained = dock.claim("train", 9, partition="train", worker="t", timeout_s=1.0)
    assert trained.group_ids.tolist() == [0, 0]
    waiting = dock.stats()["partitions"]["train"]["tasks"]["reward"]
    assert waiting["ready"] == 0  # what is scored is not scored again


def test_a_dock_that_has_nothing_of_the_partition_has_no_group(dock):
    assert settle(dock, "train", {1, 2}) == {}
