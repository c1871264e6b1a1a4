"""The served dock: who may come in, what bad frames do, one arena, and nothing left behind."""

import contextlib
import multiprocessing
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import PlatformError, WorkerLost
from mindspeed_asyncflow.records import PromptRow

SECRET = "a secret of this test"
CLAIM = {
    "task": "rollout", "partition": "train", "count": 1, "worker": "w", "unit": "rows", "policy": "fifo",
    "group_ids": None, "min_version": None, "timeout_s": 60.0, "at_least": 1, "columns": [], "copy": False,
    "max_age_s": None, "seed": 0, "team": "", "rank": 0, "ranks": 1, "split": "same",
}  # fmt: skip


def raw_socket(server: DockServer, known: bool = True) -> socket.socket:
    """A connection that speaks by hand; `known`: it has shown the secret."""
    host, port = server.address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=5.0)
    challenge = sock.recv(wire.CHALLENGE_BYTES, socket.MSG_WAITALL)
    if known:
        answer = {"answer": wire.answer(SECRET.encode(), challenge)}
        sock.sendall(b"".join(wire.encode(wire.Verb.HELLO, 0, 1, 0, answer)))
        header = wire.decode_header(sock.recv(wire.HEADER.size, socket.MSG_WAITALL), 1 << 20)
        sock.recv(header.body_bytes, socket.MSG_WAITALL)
    return sock


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "the server did not notice within 10 s"
        time.sleep(0.002)


def test_a_wrong_secret_is_refused(server):
    for wrong in ("", "another", SECRET + "x"):
        with pytest.raises(WorkerLost, match="secret is wrong"):
            DockClient(server.address, wrong, wait_s=2.0)


def test_nothing_but_a_greeting_is_read_before_the_secret_was_shown(server):
    for frame in (
        wire.encode(wire.Verb.STATS, 0, 1, 1, {}),
        wire.encode(wire.Verb.HELLO, 0, 1, 1, {"answer": np.zeros(32, np.uint8)}),
        wire.encode(wire.Verb.HELLO, 0, 1, 1, {"answer": np.zeros(1 << 16, np.uint8)}),
    ):
        sock = raw_socket(server, known=False)
        sock.sendall(b"".join(frame))
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        sock.close()


def test_a_busy_port_is_a_platform_error_that_names_the_key_and_leaves_nothing(server, tmp_path):
    port = int(server.address.rsplit(":", 1)[1])
    path = str(tmp_path / "arena")
    with pytest.raises(PlatformError, match=r"dock\.port"):
        DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=1, port=port, arena_path=path)
    assert not os.path.exists(path)


def mutate(rng: random.Random, frame: bytes) -> bytes:
    """A frame with a few bytes, its length, or whole values changed."""
    kind = rng.randrange(3)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 200))
    data = bytearray(frame)
    begin = wire.HEADER.size if kind == 1 else 0
    for _ in range(rng.randint(1, 6)):
        data[rng.randrange(begin, len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(1, len(data) + 1)] if rng.random() < 0.3 else data)


def test_malformed_frames_close_their_connection_and_touch_nobody(server, connect, prompts):
    rng = random.Random(1)
    client = connect()
    rows = np.concatenate(client.put_groups("other", prompts(4)))
    before = client.stats()["partitions"]["other"]
    claim = CLAIM | {"partition": "fuzz", "timeout_s": 0.001}
    put = {
        "partition": "fuzz", "group_ids": np.arange(2), "sizes": np.full(2, 2), "counts": np.full(2, 2),
        "members": np.arange(4, dtype=np.int32), "columns": ["prompt_ids"], "timeout_s": 0.001, "reservation": 0,
        "lengths": np.full(2, 3), "data": np.zeros(24, np.uint8),
    }  # fmt: skip
    frames = [
        b"".join(wire.encode(verb, 0, 5, 7, message))
        for verb, message in [
            (wire.Verb.CLAIM, claim), (wire.Verb.PUT, put), (wire.Verb.STATS, {}), (wire.Verb.SEAL, {"partition": "f"}),
            (wire.Verb.READ, {"rows": np.arange(4), "columns": ["truth"], "copy": False}),
            (wire.Verb.DROP, {"group_ids": np.arange(3), "partition": "fuzz", "reason": "x"}),
            (wire.Verb.RESERVE, put | {"put": True, "rows": 4, "groups": 2}),
            (wire.Verb.DONE, {"claim_id": 1, "task": "train", "rows": np.arange(4)}),
        ]
    ]  # fmt: skip
    for i in range(1000):
        with raw_socket(server) as sock:
            for _ in range(2):
                try:
                    sock.sendall(mutate(rng, rng.choice(frames)))
                except OSError:
                    break
        if i % 100 == 0:
            assert len(client.read(rows, ["truth"])["truth"]) == 16
    assert client.stats()["partitions"]["other"] == before
    assert server.failure is None and server.bad_frames > 100


def test_connections_that_vanish_at_once_or_with_several_parked_calls_leave_the_server_up(server, connect, prompts):
    client = connect()
    reset = struct.pack("ii", 1, 0)  # close with RST
    host, port = server.address.rsplit(":", 1)
    for i in range(100):
        sock = raw_socket(server) if i % 2 else socket.create_connection((host, int(port)))
        if i % 2:
            sock.sendall(b"".join(b"".join(wire.encode(wire.Verb.CLAIM, 0, 3, 5 * i + k, CLAIM)) for k in range(5)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        sock.close()
        if i % 10 == 9:
            client.put_groups("train", prompts(1, size=8, first=i))
    wait_until(lambda: not client.stats()["waiting"])
    assert server.failure is None


def test_well_formed_frames_with_hostile_values_are_answered(server, connect, prompts):
    client = connect()
    client.put_groups("train", prompts(1))
    base = CLAIM | {"timeout_s": 0.0}
    hostile = [
        (wire.Verb.CLAIM, base | {"timeout_s": 1e300, "partition": "none"}),
        (wire.Verb.CLAIM, base | {"timeout_s": float("nan")}),
        (wire.Verb.CLAIM, base | {"count": (1 << 64) - 1, "at_least": 1 << 62}),
        (wire.Verb.CLAIM, base | {"min_version": -(1 << 63)}),
        (wire.Verb.CLAIM, base | {"group_ids": np.zeros(0, np.int64), "unit": "groups"}),
        (wire.Verb.DROP, {"group_ids": np.zeros(0, np.int64), "partition": "train", "reason": "x"}),
        (wire.Verb.RESERVE, {"columns": ["finish"], "lengths": np.zeros(0, np.int64), "rows": 1 << 62, "groups": 0,
                             "put": False, "timeout_s": 0.0}),
        (wire.Verb.WRITE, {"rows": np.arange(3), "claim_id": 1 << 63, "columns": [], "reservation": 0,
                           "timeout_s": 0.0}),
        (wire.Verb.PUT, {"partition": "fuzz", "group_ids": np.array([1]), "sizes": np.array([1 << 62]),
                         "counts": np.array([1]), "members": np.zeros(1, np.int32)}),
    ]  # fmt: skip
    for verb, message in hostile:
        with raw_socket(server) as sock:
            sock.settimeout(0.3)
            sock.sendall(b"".join(wire.encode(verb, 0, 9, hash(str(message)) & 0xFFFF, message)))
            with contextlib.suppress(TimeoutError):
                sock.recv(1)
    assert server.failure is None and client.stats()["partitions"]["train"]["rows"] == 4


def test_one_segment_serves_all_batches_and_is_gone_after_close(prompts):
    before = set(os.listdir("/dev/shm"))
    server = DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=1, secret=SECRET).start()
    try:
        name = os.path.basename(server.arena_path)
        mine = {name, f"{name}.journal"}
        with DockClient(server.address, SECRET) as client:
            for i in range(150):
                rows = client.put_groups("train", prompts(2, size=2, first=2 * i, tokens=300))
                client.write(np.concatenate(rows), {"response_ids": [np.zeros(500, np.int32)] * 4})
                client.free(np.concatenate(rows))
                if i % 30 == 0:
                    assert mine <= set(os.listdir("/dev/shm"))
                    assert not [n for n in set(os.listdir("/dev/shm")) - before - mine if "asyncflow-dock" in n]
            assert client.stats()["used_bytes"] == 0
    finally:
        server.close()
    server.close()
    assert not mine & set(os.listdir("/dev/shm"))
    assert not [t for t in threading.enumerate() if t.name == "dock-server"]


def test_bytes_reserved_by_a_lost_connection_are_free_again(server, connect):
    client = connect()
    with raw_socket(server) as sock:
        message = {"columns": ["response_ids"], "lengths": np.array([1 << 18]), "rows": 1, "groups": 1, "put": False,
                   "timeout_s": 0.0}  # fmt: skip
        sock.sendall(b"".join(wire.encode(wire.Verb.RESERVE, 0, 3, 1, message)))
        sock.recv(wire.HEADER.size, socket.MSG_WAITALL)
        assert client.stats()["reserved_bytes"] == 1 << 20
    wait_until(lambda: not client.stats()["reserved_bytes"])


def test_a_waiter_whose_connection_is_lost_takes_no_rows(server, connect, prompts):
    client = connect()
    with raw_socket(server) as sock:
        sock.sendall(b"".join(wire.encode(wire.Verb.CLAIM, 0, 3, 1, CLAIM | {"count": 9})))
        wait_until(lambda: client.stats()["waiting"])
    wait_until(lambda: not client.stats()["waiting"])
    client.put_groups("train", prompts(1))
    assert client.stats()["partitions"]["train"]["tasks"]["rollout"]["ready"] == 4


def _consume(address: str, name: str, out: "multiprocessing.Queue") -> None:
    taken, checks = [], 0
    with DockClient(address, SECRET, wait_s=20.0) as client:
        while not (claim := client.claim("rollout", 16, partition="train", worker=name)).sealed:
            prompt = client.read(claim.rows, ["prompt_ids"])["prompt_ids"]
            checks += sum(p.tolist() == [g] * 6 for p, g in zip(prompt, claim.group_ids))
            ids = [np.array([row % 1009], np.int32) for row in claim.rows]
            client.write(claim.rows, {"response_ids": ids}, claim_id=claim.claim_id, done=True)
            taken += claim.rows.tolist()
    out.put((taken, checks))


@pytest.mark.slow
def test_two_processes_share_a_stream_and_read_each_others_bytes():
    context = multiprocessing.get_context("spawn")
    with DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=4, secret=SECRET) as server:
        out = context.Queue()
        workers = [context.Process(target=_consume, args=(server.address, f"p{i}", out)) for i in range(2)]
        for worker in workers:
            worker.start()
        with DockClient(server.address, SECRET) as client:
            rows = []
            for g in range(200):
                group = [PromptRow(g, m, 4, np.full(6, g, np.int32), "") for m in range(4)]
                rows += client.put_groups("train", [group])[0].tolist()
            client.seal("train")
            results = [out.get(timeout=60) for _ in workers]
            for worker in workers:
                worker.join(20)
            assert sorted(r for taken, _ in results for r in taken) == sorted(rows)
            assert sum(checks for _, checks in results) == 800
            handles = np.array(rows)
            got = client.read(handles, ["response_ids"])["response_ids"]
            assert [int(v[0]) for v in got] == (handles % 1009).tolist()
