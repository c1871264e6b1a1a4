"""Processes that are killed or frozen at any step, as `kill -9` and SIGSTOP do it, on nodes that share nothing."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.channel import Broken
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import ColumnSpec, TaskSpec
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.dock.table import pair_numbers
from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded, DockError, StaleHandle, WorkerLost

pytestmark = pytest.mark.slow
SECRET = "a secret of this test"
COLUMNS = [
    ColumnSpec("prompt", "int32", "ragged", shared=True, tokens=True),
    ColumnSpec("x", "int32", "ragged", tokens=True),
]
TASKS = [TaskSpec("make", ("prompt",)), TaskSpec("learn", ("prompt", "x"))]
SPAWN = multiprocessing.get_context("spawn")


def serve(pipe, how: dict) -> None:
    with DockServer(COLUMNS, TASKS, secret=SECRET, **how) as server:
        pipe.send(server.address)
        with contextlib.suppress(EOFError):
            pipe.recv()


class Node:
    """One pair in a process of its own; what it leaves in memory outlives it."""

    def __init__(self, folder, number: int, lease_s: float) -> None:
        self.path = f"/dev/shm/asyncflow-{os.getpid()}-test-{folder.name}-{number}"
        self.how = {"host": f"127.0.0.{20 + number}", "arena_mb": 8, "lease_s": lease_s, "arena_path": self.path}
        self.number, self.port, self.restarts = number, 0, 0
        self.start()

    def start(self) -> None:
        self._pipe, there = SPAWN.Pipe()
        again = {"restart": True} if self.port else {}
        self.process = SPAWN.Process(target=serve, args=(there, self.how | {"port": self.port} | again), daemon=True)
        self.process.start()
        there.close()
        assert self._pipe.poll(30.0), "the pair did not start"
        self.address = self._pipe.recv()
        self.port = int(self.address.rpartition(":")[2])

    def kill(self, sig: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, sig)
        if sig == signal.SIGKILL:
            self.process.join(10.0)
        if sig == signal.SIGSTOP:  # its threads go on until the one that got the signal has had its turn
            Cluster.until(lambda: all("T (stopped)" in task.read_text() for task in self._tasks()))

    def _tasks(self) -> list[Path]:
        return list(Path(f"/proc/{self.process.pid}/task").glob("*/status"))

    def again(self) -> None:
        """Killed, and started again on the same port."""
        self.kill()
        self.start()
        self.restarts += 1

    def close(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, signal.SIGCONT)
            self._pipe.close()
            self.process.join(10.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10.0)
        for name in (self.path, f"{self.path}.journal", f"{self.path}.journal.new"):
            with contextlib.suppress(OSError):
                os.unlink(name)


class Cluster:
    def __init__(self, folder, count: int, lease_s: float) -> None:
        self.nodes = [Node(folder, n, lease_s) for n in range(count)]
        self.addresses = [node.address for node in self.nodes]
        self.clients: list[DockClient] = []
        self.client(0)
        for n in range(count):
            self.until(lambda n=n: self.clients[0]._pair(n).stats()["pairs"] == count)

    def client(self, home: int, **how) -> DockClient:
        how = {"wait_s": 10.0, "map_arena": False, "restart_s": 10.0} | how
        self.clients.append(DockClient(self.addresses, SECRET, home=home, **how))
        return self.clients[-1]

    @staticmethod
    def until(condition: Callable[[], object], limit_s: float = 15.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"did not happen within {limit_s} s"
            time.sleep(0.01)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for node in self.nodes:
            node.close()


@pytest.fixture
def cluster(tmp_path):
    made = []

    def make(count: int = 1, lease_s: float = 20.0) -> Cluster:
        made.append(Cluster(tmp_path, count, lease_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt(group: int) -> np.ndarray:
    return np.arange(group % 50 + 1, dtype=np.int32) + group


def result(group: int, length: int = 3000) -> np.ndarray:
    """Long enough to be reserved and sent as bulk."""
    return (np.arange(length + group % 17) * (group + 1)).astype(np.int32)


def put(client: DockClient, ids: list[int], partition: str = "p", size: int = 2) -> list[np.ndarray]:
    n = len(ids)
    return client.put(partition, ids, [size] * n, [size] * n, values={"prompt": [prompt(g) for g in ids]})


def in_process(action: Callable, *arguments) -> multiprocessing.Process:
    process = SPAWN.Process(target=action, args=arguments, daemon=True)
    process.start()
    return process


# -- producers and consumers -------------------------------------------------------------------------------------------


def reserve_and_stop(address: str, gate) -> None:
    """A producer that has reserved room, and one that is in the middle of its bulk."""
    client = DockClient(address, SECRET, map_arena=False)
    pair = client._pair(0)
    channels = [pair._open(), pair._open()]
    big = {"lengths": np.array([400_000], np.int64), "columns": ["prompt"], "put": True, "rows": 1, "groups": 1,
           "timeout_s": 1.0}  # fmt: skip
    replies = [channel.call(wire.Verb.RESERVE, 10 + i, big) for i, channel in enumerate(channels)]
    message = {
        "partition": "p", "group_ids": np.array([1]), "sizes": np.array([1]), "counts": np.array([1]),
        "members": np.zeros(1, np.int32), "reservation": replies[1].whole("reservation"), "timeout_s": 1.0,
    }  # fmt: skip
    head = wire.frame(wire.Verb.PUT, 0, 99, 20, message, 1_600_000)
    channels[1]._socket.sendall(head + bytes(500_000))
    gate.send(True)
    time.sleep(60)


def test_a_producer_killed_between_reserving_and_putting_or_within_its_bulk_leaves_nothing(cluster):
    client = cluster().client(0)
    free = client.stats()["free_bytes"]
    here, there = SPAWN.Pipe()
    process = in_process(reserve_and_stop, client.address, there)
    assert here.poll(30.0) and here.recv()
    Cluster.until(lambda: client.stats()["free_bytes"] < free - 3_000_000)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    Cluster.until(lambda: client.stats()["free_bytes"] == free)
    assert client.stats()["live_rows"] == 0
    handles = put(client, [1])
    assert client.read(handles[0], ["prompt"])["prompt"][0].tolist() == prompt(1).tolist()


def claim_and_stop(address: str, gate) -> None:
    client = DockClient(address, SECRET, map_arena=False)
    claim = client.claim("make", 3, partition="p", worker="victim")
    gate.send(claim.rows.tolist())
    time.sleep(60)


@pytest.mark.parametrize("how", ["lease", "forget"])
def test_rows_of_a_killed_consumer_are_offered_again(cluster, how):
    client = cluster(lease_s=1.0 if how == "lease" else 60.0).client(0)
    put(client, [1, 2, 3])
    here, there = SPAWN.Pipe()
    process = in_process(claim_and_stop, client.address, there)
    assert here.poll(30.0)
    rows = here.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    if how == "forget":
        assert client.forget_worker("victim") == 1
    got = client.claim("make", 6, partition="p", worker="w", at_least=6, timeout_s=8.0)
    assert set(rows) <= set(got.rows.tolist()) and len(set(got.rows.tolist())) == 6


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_waiting_claims_survive_the_restart_of_their_pair_and_of_another(cluster):
    dock = cluster(2)
    feeder = dock.client(0)
    got: list = []
    threads = []
    for home in (0, 1):
        client = dock.client(home, wait_s=25.0)
        threads.append(threading.Thread(
            target=lambda c=client, h=home: got.append(c.claim("make", 2, partition="p", worker=f"w{h}"))
        ))  # fmt: skip
        threads[-1].start()
    Cluster.until(lambda: len(feeder.stats()["waiting"]) == 4)  # each at both pairs
    dock.nodes[1].again()
    Cluster.until(lambda: len(feeder.stats()["waiting"]) == 4)
    dock.nodes[0].again()
    Cluster.until(lambda: len(feeder.stats()["waiting"]) == 4)
    handles = [*put(feeder, [1]), *put(feeder, [2])]
    for thread in threads:
        thread.join(15.0)
        assert not thread.is_alive()
    assert sorted(r for c in got for r in c.rows.tolist()) == sorted(np.concatenate(handles).tolist())


def test_a_pair_killed_between_reserving_and_putting_or_after_a_put_has_the_rows_once(cluster):
    dock = cluster()
    client, node = dock.client(0), dock.nodes[0]
    pair = client._pair(0)
    free = client.stats()["free_bytes"]
    open_ = pair._open
    for step, group in (("PUT", 1), ("RESERVE", 2)):
        killed = []

        def opened(step=step, killed=killed):
            channel = open_()
            call = channel.call

            def calling(verb, request, message, bulk=()):
                if verb.name == step and not killed and step == "PUT":
                    killed.append(1)
                    node.again()  # room is reserved; the values are on their way
                answer = call(verb, request, message, bulk)
                if verb.name == "PUT" and not killed:
                    killed.append(1)
                    node.again()  # carried out; the answer does not arrive
                    raise Broken("the connection broke")
                return answer

            channel.call = calling
            return channel

        pair._open = opened
        pair._idle.clear()
        big = {"prompt": [np.full(40_000, group, np.int32)]}
        client.put("p", [group], [2], [2], values=big)
        assert killed
    pair._open = open_
    claim = client.claim("make", 8, partition="p", worker="w", columns=("prompt",))
    assert claim.group_ids.tolist() == [1, 1, 2, 2]
    assert all((row == g).all() and len(row) == 40_000 for g, row in zip(claim.group_ids, claim.values["prompt"]))
    client.done(claim.claim_id)
    assert client.stats()["payload_bytes"] < free


def consume(addresses: list[str], home: int, seconds: float, out: str, mapped: bool) -> None:
    """Makes results for prompts and learns from them until the stream ends; notes what it has done."""
    client = DockClient(addresses, SECRET, wait_s=20.0, map_arena=mapped, restart_s=15.0, home=home)
    worker, finished, lost, wrong = f"c{home}-{os.getpid()}", [], 0, 0
    deadline = time.monotonic() + seconds
    ended = {"make": False, "learn": False}
    while not all(ended.values()) and time.monotonic() < deadline:
        for task in ("make", "learn"):
            if ended[task]:
                continue
            try:
                claim = client.claim(task, 4, partition="p", worker=worker, timeout_s=1.0)
            except DeadlineExceeded:
                continue
            if claim.sealed:
                ended[task] = True
                continue
            try:
                got = client.read(claim.rows, ["prompt"] if task == "make" else ["prompt", "x"])
                for i, group in enumerate(claim.group_ids.tolist()):
                    wrong += got["prompt"][i].tobytes() != prompt(group).tobytes()
                    wrong += task == "learn" and got["x"][i].tobytes() != result(group).tobytes()
                if task == "make":
                    values = {"x": [result(g) for g in claim.group_ids.tolist()]}
                    client.write(claim.rows, values, claim_id=claim.claim_id, done=True)
                else:
                    client.done(claim.claim_id)
                    finished += claim.rows.tolist()
            except (ClaimLost, StaleHandle):
                lost += 1
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"finished": finished, "lost": lost, "wrong": wrong, "ended": ended}, file)


@pytest.mark.parametrize(("seed", "mapped"), [(1, False), (2, True)])
def test_pairs_killed_again_and_again_under_load_lose_no_row_and_serve_none_twice(cluster, tmp_path, seed, mapped):
    """Two consumers, one producer, three pairs, of which a random one is killed and started again all the time."""
    rng = random.Random(seed)
    dock = cluster(3, lease_s=4.0)
    outs = [str(tmp_path / f"out{i}") for i in range(2)]
    consumers = [in_process(consume, dock.addresses, i, 90.0, outs[i], mapped) for i in range(2)]
    client = dock.client(2, restart_s=15.0, wait_s=20.0, map_arena=mapped)
    handles: list[int] = []
    produced = threading.Event()

    def produce() -> None:
        for first in range(0, 400, 4):
            handles.extend(np.concatenate(put(client, list(range(first, first + 4)))).tolist())
            time.sleep(0.03)
        produced.set()

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    while not produced.is_set():
        time.sleep(rng.uniform(0.02, 0.3))
        rng.choice(dock.nodes).again()
        assert sum(node.restarts for node in dock.nodes) < 200
    producer.join()
    client.seal("p")
    for node in rng.sample(dock.nodes, 3):
        node.again()
    for process in consumers:
        process.join(100.0)
        assert not process.is_alive()
    found = []
    for out in outs:
        with open(out, encoding="utf-8") as file:
            found.append(json.load(file))
    assert all(f["wrong"] == 0 and all(f["ended"].values()) for f in found), found
    assert Counter(r for f in found for r in f["finished"]) == Counter(handles)
    states = client.stats()["partitions"]["p"]["tasks"]
    assert all(states[task]["done"] == len(handles) == 800 for task in ("make", "learn"))
    claimed = client.stats()["payload_bytes"]
    assert claimed == sum(prompt(g).nbytes + 2 * result(g).nbytes for g in range(400))
    client.free(np.array(handles))
    stats = client.stats()
    assert stats["payload_bytes"] == 0 and stats["live_rows"] == 0
    assert sum(node.restarts for node in dock.nodes) >= 8


def test_a_pair_that_is_killed_for_good_is_named_and_its_groups_are_issued_again(cluster):
    dock = cluster(3)
    client, other = dock.client(0, restart_s=0.5), dock.client(1, restart_s=0.5)
    handles = put(client, list(range(60)))
    rows = np.concatenate(handles)
    lost = [g for g, h in enumerate(handles) if pair_numbers(h)[0] == 2]
    held = other.claim("make", 60, partition="p", worker="w", timeout_s=5.0)
    dock.nodes[2].kill()
    calls = [
        lambda: client.read(rows, ["prompt"]), lambda: client.free(rows[::-1][:1]), lambda: client.seal("q"),
        lambda: client.add_task("t", ["x"]), lambda: client.forget_worker("nobody"),
        lambda: client.write(rows[-2:], {"x": [result(1)] * 2}), lambda: client.done((2 << 48) + 1),
        lambda: client.drop(group_ids=[lost[0]], partition="p", reason="r"), lambda: client.lost_groups(1),
        lambda: client.close_partition("nowhere"),
    ]  # fmt: skip
    for call in calls:
        start = time.monotonic()
        try:
            call()
        except (WorkerLost, DockError) as error:
            assert "pair 2" in str(error) or isinstance(error, DockError), error
        assert time.monotonic() - start < 5.0
    assert client.lost_groups(2)["p"].tolist() == lost
    other.done(held.claim_id)
    client.forget_pair(2)
    again = put(client, [g + 1000 for g in lost])
    client.seal("p")
    got = [] if pair_numbers(held.rows)[0] == 2 else held.rows.tolist()
    while not (claim := other.claim("make", 50, partition="p", worker="w", timeout_s=5.0)).sealed:
        got += claim.rows.tolist()
        other.done(claim.claim_id)
    kept = [h for h in handles if pair_numbers(h)[0] != 2]
    assert sorted(got) == sorted(np.concatenate(kept + again).tolist())


def test_a_frozen_pair_holds_up_nobody_but_those_who_need_its_rows(cluster):
    dock = cluster(3)
    client, other = dock.client(0, wait_s=2.0), dock.client(1, wait_s=2.0)
    handles = put(client, list(range(30)))
    rows = {n: np.concatenate([h for h in handles if pair_numbers(h)[0] == n]) for n in range(3)}
    dock.nodes[2].kill(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.22"):
        client.read(rows[2], ["prompt"])
    assert time.monotonic() - start < 8.0
    for n in (0, 1):
        start = time.monotonic()
        client._pair(n).put("q", [n], values={"prompt": [prompt(1)]})
        client._pair(n).put("q", [n + 10], values={"prompt": [prompt(1)]})
        assert other.read(rows[n], ["prompt"])["prompt"][0].dtype == np.int32
        claim = client.claim("make", 5, partition="p", worker="w")
        client.done(claim.claim_id)
        assert time.monotonic() - start < 2.5
    dock.nodes[2].kill(signal.SIGCONT)
    assert len(client.read(rows[2], ["prompt"])["prompt"]) == len(rows[2])
    client.seal("p")
    total = 0
    while not (claim := client.claim("make", 50, partition="p", worker="w", timeout_s=5.0)).sealed:
        total += len(claim.rows)
        client.done(claim.claim_id)
    assert total == 50


def test_a_consumer_whose_home_is_frozen_goes_on_at_the_next_pair(cluster):
    dock = cluster(2)
    client = dock.client(1, wait_s=1.0)
    rows = np.concatenate(put(client, list(range(10))))
    dock.nodes[1].kill(signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        client.claim("make", 1, partition="p", worker="w", timeout_s=0.5)
    claim = client.claim("make", 50, partition="p", worker="w", timeout_s=0.5)
    assert set(claim.rows.tolist()) == set(rows[pair_numbers(rows) == 0].tolist())
    dock.nodes[1].kill(signal.SIGCONT)


# -- two nodes with networks of their own ------------------------------------------------------------------------------

NODE = """
import sys
from tests.dock.test_crash import COLUMNS, SECRET, TASKS
from mindspeed_asyncflow.dock.server import DockServer
with DockServer(COLUMNS, TASKS, secret=SECRET, arena_mb=8, host=sys.argv[1], port=7000, arena_path=sys.argv[2]) as s:
    print(s.address, flush=True)
    sys.stdin.readline()
"""
CONSUMER = """
import sys
from tests.dock.test_crash import SECRET, prompt, result
from mindspeed_asyncflow.dock.client import DockClient
client = DockClient(sys.argv[1].split(","), SECRET, map_arena=False, home=1)
total = 0
while not (claim := client.claim("make", 8, partition="p", worker="far", columns=("prompt",))).sealed:
    for group, row in zip(claim.group_ids.tolist(), claim.values["prompt"]):
        assert row.tobytes() == prompt(group).tobytes()
    groups = claim.group_ids.tolist()
    client.write(claim.rows, {"x": [result(g) for g in groups]}, claim_id=claim.claim_id, done=True)
    total += len(claim.rows)
print(total, flush=True)
"""


def _namespaces_work() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    name = f"dockprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return made


@pytest.fixture
def networks():
    """Two network namespaces, a and b, joined by a cable: 10.77.0.1 and 10.77.0.2."""
    if not _namespaces_work():
        pytest.skip("this machine permits no network namespaces")
    a, b = f"docka{os.getpid()}", f"dockb{os.getpid()}"
    cable = (f"va{os.getpid() % 100000}", f"vb{os.getpid() % 100000}")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in (a, b):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", a, "link", "add", cable[0], "type", "veth", "peer", "name", cable[1], "netns", b)
        for name, end, address in ((a, cable[0], "10.77.0.1/24"), (b, cable[1], "10.77.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", end)
            ip("-n", name, "link", "set", end, "up")
    except subprocess.CalledProcessError as error:
        for name in (a, b):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        pytest.skip(f"this machine permits no cable between network namespaces: {error.stderr.decode().strip()}")
    yield a, b, lambda up: ip("-n", b, "link", "set", cable[1], "up" if up else "down")
    for name in (a, b):
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def run_in(name: str, code: str, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-c", code, *arguments], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


ELSEWHERE = """
import sys
from mindspeed_asyncflow.dock.arena import Arena
attach = Arena.attach
Arena.attach = lambda path, token: None if path == sys.argv[2] else attach(path, token)  # memory of another node
"""
PRODUCER = """
import sys
import numpy as np
from tests.dock.test_crash import SECRET, put, result
from mindspeed_asyncflow.dock.client import DockClient
client = DockClient(sys.argv[1].split(","), SECRET, home=0)
assert client.mapped and not client._pair(1).mapped
handles = np.concatenate(put(client, list(range(64))))
client.seal("p")
print("put", flush=True)
seen = 0
while not (claim := client.claim("learn", 16, partition="p", worker="near", columns=("x",))).sealed:
    for group, row in zip(claim.group_ids.tolist(), claim.values["x"]):
        assert row.tobytes() == result(group).tobytes()
    client.done(claim.claim_id)
    seen += len(claim.rows)
client.free(handles)
stats = client.stats()
print(seen, stats["payload_bytes"], stats["peers"]["steals"] > 0, flush=True)
"""


def test_two_nodes_with_networks_of_their_own_run_one_stream(networks, tmp_path):
    a, b, _ = networks
    addresses = "10.77.0.1:7000,10.77.0.2:7000"
    paths = [f"/dev/shm/asyncflow-{os.getpid()}-test-net-{n}" for n in "ab"]
    servers = [run_in(name, NODE, f"10.77.0.{i + 1}", path) for i, (name, path) in enumerate(zip((a, b), paths))]
    others: list[subprocess.Popen] = []
    try:
        for server in servers:
            assert server.stdout is not None and server.stdout.readline().startswith("10.77."), server.stderr.read()
        producer = run_in(a, ELSEWHERE + PRODUCER, addresses, paths[1])
        others.append(producer)
        assert producer.stdout is not None and producer.stdout.readline() == "put\n", producer.stderr.read()
        consumer = run_in(b, CONSUMER, addresses)
        others.append(consumer)
        made, trouble = consumer.communicate(timeout=60)
        assert made == "128\n", trouble
        said, trouble = producer.communicate(timeout=60)
        assert said == "128 0 True\n", trouble
    finally:
        end(others, servers, paths)


def end(others: list[subprocess.Popen], servers: list[subprocess.Popen], paths: list[str]) -> None:
    for process in (*others, *servers):
        with contextlib.suppress(OSError, ValueError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()
    for path in paths:
        for name in (path, f"{path}.journal"):
            with contextlib.suppress(OSError):
                os.unlink(name)


CUT = """
import sys, time
import numpy as np
from tests.dock.test_crash import SECRET, put
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.table import pair_numbers
from mindspeed_asyncflow.errors import DeadlineExceeded, WorkerLost
client = DockClient(sys.argv[1].split(","), SECRET, map_arena=False, home=0, wait_s=1.5, restart_s=0.5)
rows = np.concatenate(put(client, list(range(20))))
mine, far = rows[pair_numbers(rows) == 0], rows[pair_numbers(rows) == 1]
print("put", flush=True)
sys.stdin.readline()
begin = time.monotonic()
try:
    client.read(far, ["prompt"])
except (DeadlineExceeded, WorkerLost) as error:
    assert "10.77.0.2" in str(error), error
else:
    raise AssertionError("rows behind a cut cable were read")
assert len(client.read(mine, ["prompt"])["prompt"]) == len(mine)
known = client.lost_groups(1)["p"]
assert len(known) == len(far) // 2
client._pair(0).forget_pair(1)
client._drop_pair(1)
again = np.concatenate(put(client, [int(g) + 100 for g in known]))
client.seal("p")
got = []
while not (claim := client.claim("make", 8, partition="p", worker="near")).sealed:
    got += claim.rows.tolist()
    client.done(claim.claim_id)
assert sorted(got) == sorted([*mine.tolist(), *again.tolist()])
print(time.monotonic() - begin < 20, flush=True)
"""


def test_a_node_whose_cable_is_cut_is_named_and_the_other_goes_on_without_it(networks):
    a, b, cable = networks
    paths = [f"/dev/shm/asyncflow-{os.getpid()}-test-cut-{n}" for n in "ab"]
    servers = [run_in(name, NODE, f"10.77.0.{i + 1}", path) for i, (name, path) in enumerate(zip((a, b), paths))]
    client = None
    try:
        for server in servers:
            assert server.stdout is not None and server.stdout.readline().startswith("10.77."), server.stderr.read()
        client = run_in(a, CUT, "10.77.0.1:7000,10.77.0.2:7000")
        assert client.stdout is not None and client.stdout.readline() == "put\n", client.stderr.read()
        cable(False)
        said, trouble = client.communicate("cut\n", timeout=60)
        assert said == "True\n", trouble
    finally:
        end([client] if client is not None else [], servers, paths)
