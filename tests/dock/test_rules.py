"""Rules of the dock that a published store of this kind breaks and that no other test here states; seen by clients."""

import ast
import gc
import itertools
import socket
import struct
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import mindspeed_asyncflow.dock
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import ColumnSpec, TaskSpec
from mindspeed_asyncflow.dock.leases import SPREAD_CLAIM
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.dock.wire import Verb
from mindspeed_asyncflow.errors import DeadlineExceeded, DockError, StaleHandle

SECRET = "a secret of this test"
COLUMNS = [
    ColumnSpec("prompt", "int32", "ragged", shared=True, tokens=True),
    ColumnSpec("x", "int32", "ragged", tokens=True),
    ColumnSpec("y", "float32", "ragged"),
]
TASKS = [TaskSpec("make", ("prompt",)), TaskSpec("use", ("x",)), TaskSpec("both", ("x", "y"))]


@pytest.fixture
def served():
    with DockServer(COLUMNS, TASKS, arena_mb=4, lease_s=30.0, secret=SECRET) as server:
        yield server
        assert server.failure is None


@pytest.fixture
def client(served):
    with DockClient(served.address, SECRET, wait_s=5.0) as made:
        yield made


@pytest.fixture
def remote(served):
    with DockClient(served.address, SECRET, wait_s=5.0, map_arena=False) as made:
        yield made


def rows_of(client: DockClient, n: int, partition: str = "p", length: int = 10) -> np.ndarray:
    return client.put(partition, values={"x": [np.full(length, i, np.int32) for i in range(n)]})[0]


def moved(client: DockClient) -> tuple[int, int]:
    """Bytes that a client's connections have sent and received, as the kernel counts them."""
    sent = received = 0
    for channel in client._pair(0)._idle:
        info = channel._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        acked, came = struct.unpack_from("<QQ", info, 120)
        sent, received = sent + acked, received + came
    return sent, received


def cost(client: DockClient, action) -> tuple[int, int]:
    client.stats()
    before = moved(client)
    action()
    after = moved(client)
    return after[0] - before[0], after[1] - before[1]


# -- partitions and identity -------------------------------------------------------------------------------------------


def test_a_closed_partition_shows_nothing_of_itself_or_of_another_when_its_rows_are_used_again(client):
    """B51"""
    old = rows_of(client, 4, "p1")
    client.close_partition("p1")
    new = rows_of(client, 4, "p2", length=3)
    with pytest.raises(DeadlineExceeded):
        client.claim("use", 1, partition="p1", worker="w", timeout_s=0.0)
    assert not set(old.tolist()) & set(new.tolist())
    for verb in (
        lambda: client.read(old, ["x"]),
        lambda: client.free(old),
        lambda: client.write(old, {"y": [[1.0]] * 4}),
    ):
        with pytest.raises(StaleHandle):
            verb()
    assert [len(row) for row in client.read(new, ["x"])["x"]] == [3] * 4


def test_a_put_that_was_prepared_before_its_partition_was_closed_is_seen_or_refused_and_leaves_no_byte(remote):
    free = remote.stats()["free_bytes"]
    rows_of(remote, 2)
    pair = remote._pair(0)
    open_ = pair._open

    def opened():
        channel = open_()
        call = channel.call

        def calling(verb, request, message, bulk=()):
            answer = call(verb, request, message, bulk)
            if verb.name == "RESERVE":
                remote.close_partition("p")
            return answer

        channel.call = calling
        return channel

    pair._open = opened
    pair._idle.clear()
    rows = rows_of(remote, 3, length=30_000)
    pair._open = open_
    pair._idle.clear()
    assert remote.claim("use", 9, partition="p", worker="w").rows.tolist() == rows.tolist()
    remote.close_partition("p")
    remote.forget_worker("w")
    assert remote.stats()["free_bytes"] == free and remote.stats()["partitions"] == {}


def test_a_partition_is_closed_while_rows_lack_columns_and_while_room_is_reserved(client, remote):
    free = client.stats()["free_bytes"]
    rows_of(client, 5)
    client.put("p", [1, 2], [4, 4], [1, 2], values={"prompt": [[1], [2]]})
    channel = remote._pair(0)._open()
    channel.call(Verb.RESERVE, 1, {
        "columns": ["prompt"], "put": True, "rows": 1, "groups": 1, "timeout_s": 1.0,
        "lengths": np.array([100_000], np.int64),
    })  # fmt: skip
    client.close_partition("p")
    assert client.stats()["partitions"] == {} and client.stats()["payload_bytes"] == 0
    channel.close()
    deadline = time.monotonic() + 5.0
    while client.stats()["free_bytes"] != free:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_misspelt_name_is_an_error_that_suggests_the_right_one(client):
    rows = rows_of(client, 2, "train")
    with pytest.raises(DockError, match="'use'"):
        client.claim("uze", 1, partition="train", worker="w")
    with pytest.raises(DockError, match="unknown column 'xx'"):
        client.read(rows, ["xx"])
    with pytest.raises(DockError, match="unknown column 'prompts'"):
        client.put("train", values={"prompts": [[1]]})
    with pytest.raises(DeadlineExceeded, match="'tran'; did you mean 'train'"):
        client.claim("use", 1, partition="tran", worker="w", timeout_s=0.0)
    with pytest.raises(DockError, match="no partition 'tran'"):
        client.close_partition("tran")


def test_what_is_kept_of_a_partition_depends_on_its_own_rows_only(served, client):
    for i in range(20):
        rows_of(client, 1000, f"large{i % 5}", length=1)
    rows_of(client, 16, "small", length=1)
    part = served._member.node.controller.partitions["small"]
    assert part.rows.capacity <= 256 and part.groups.capacity <= 256


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_freeing_most_rows_of_a_batch_frees_their_bytes(client):
    free = client.stats()["free_bytes"]
    rows = rows_of(client, 64, length=4096)
    held = free - client.stats()["free_bytes"]
    client.free(rows[1:63])
    left = free - client.stats()["free_bytes"]
    assert left <= held * 2 / 64 + 4 * 64
    client.free(rows[[0, 63]])
    assert client.stats()["free_bytes"] == free


def test_bytes_read_are_those_of_the_columns_that_were_asked_for(remote):
    n, length = 50, 4000
    rows = rows_of(remote, n, length=length)
    remote.write(rows, {"y": [np.zeros(3, np.float32)] * n})
    _, small = cost(remote, lambda: remote.read(rows, ["y"]))
    _, large = cost(remote, lambda: remote.read(rows, ["x"]))
    assert small < n * (12 + 16) + 1500
    assert n * length * 4 <= large < n * (length * 4 + 16) + 1500


def test_no_padding_travels_whatever_the_lengths(remote):
    lengths = [1, 60_000, 3, 0, 7]
    values = {"x": [np.arange(k, dtype=np.int32) for k in lengths]}
    rows: list = []
    sent, _ = cost(remote, lambda: rows.extend(remote.put("p", values=values)[0].tolist()))
    payload = 4 * sum(lengths)
    assert payload <= sent < payload + 2000
    _, received = cost(remote, lambda: remote.read(np.array(rows), ["x"]))
    assert payload <= received < payload + 2000


@pytest.mark.parametrize("length", [10, 15_000])
def test_who_only_directs_moves_bytes_in_proportion_to_the_rows_and_none_of_the_payload(served, remote, length):
    """Claims, dones, seals, statistics: what a driver does."""
    n = 40
    with DockClient(served.address, SECRET) as producer:
        rows_of(producer, n, length=length)

    def direct() -> None:
        for _ in range(4):
            claim = remote.claim("use", n // 4, partition="p", worker="driver")
            remote.done(claim.claim_id)
        remote.stats()

    sent, received = cost(remote, direct)
    assert sent < 4 * 1200 and received < n * 6 * 8 + 8000


def test_a_notice_to_a_waiting_consumer_carries_no_payload(served, remote):
    def wait() -> None:
        timer = threading.Timer(0.1, feed)
        timer.start()
        remote.claim("use", 4, partition="p", worker="w")
        timer.join()

    def feed() -> None:
        with DockClient(served.address, SECRET) as producer:
            rows_of(producer, 4, length=100_000)

    _, received = cost(remote, wait)
    assert received < 2000


def test_a_client_keeps_no_batch_that_its_user_has_let_go(client):
    rows = rows_of(client, 8, length=5000)
    references = []
    for _ in range(6):
        got = client.read(rows, ["x"], copy=True)["x"]
        references.append(weakref.ref(got.values))
    del got
    gc.collect()
    assert not any(reference() is not None for reference in references)


# -- readiness ---------------------------------------------------------------------------------------------------------


def test_parallel_writes_to_different_cells_of_one_row_all_survive(served, client):
    rows = np.concatenate(client.put("p", list(range(40)), values={"prompt": [[i] for i in range(40)]}))
    columns = {
        "x": [np.full(i % 5, i, np.int32) for i in range(40)],
        "y": [np.full(i % 7, i, np.float32) for i in range(40)],
    }

    def write(name: str, part: int) -> None:
        with DockClient(served.address, SECRET, map_arena=bool(part % 2)) as own:
            for i in range(part, 40, 4):
                own.write(rows[i : i + 1], {name: columns[name][i : i + 1]})

    threads = [threading.Thread(target=write, args=(name, part)) for name in columns for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    got = client.read(rows, ["prompt", "x", "y"])
    for i in range(40):
        assert got["prompt"][i].tolist() == [i]
        assert all(got[name][i].tobytes() == columns[name][i].tobytes() for name in columns)
    assert len(client.claim("both", 40, partition="p", worker="w").rows) == 40


def test_nobody_is_told_of_a_row_before_its_bytes_can_be_read(served):
    """Consumers read at once what they were granted, while producers write; no value is ever half there."""
    wrong: list = []
    counts: list[int] = []

    def consume(mapped: bool) -> None:
        seen = 0
        with DockClient(served.address, SECRET, map_arena=mapped, wait_s=5.0) as own:
            while not (claim := own.claim("use", 8, partition="p", worker=f"w{mapped}", columns=("x",))).sealed:
                assert claim.values is not None
                wrong.extend(row for row in claim.values["x"] if len(row) != 900 or (row != row[0]).any() or not row[0])
                seen += len(claim)
                own.done(claim.claim_id)
                own.free(claim.rows)
        counts.append(seen)

    def produce(mapped: bool) -> None:
        with DockClient(served.address, SECRET, map_arena=mapped, wait_s=5.0) as own:
            for i in range(60):
                own.put("p", values={"x": [np.full(900, 1 + i, np.int32)] * 20})

    consumers = [threading.Thread(target=consume, args=(mapped,), daemon=True) for mapped in (True, False)]
    producers = [threading.Thread(target=produce, args=(mapped,)) for mapped in (True, False)]
    for thread in (*consumers, *producers):
        thread.start()
    for thread in producers:
        thread.join(20.0)
    with DockClient(served.address, SECRET) as own:
        own.seal("p")
    for thread in consumers:
        thread.join(20.0)
    assert not wrong and sum(counts) == 2400


def test_a_column_that_is_not_written_cannot_be_read_and_an_equal_result_leaves_no_gap(served, client):
    rows = rows_of(client, 6, length=2000)
    with pytest.raises(DockError, match="not written yet"):
        client.read(rows, ["x", "y"])
    before = client.read(rows, ["x"], copy=True)["x"].packed().values.tobytes()
    stop = threading.Event()
    found: Counter = Counter()

    def look() -> None:
        with DockClient(served.address, SECRET, map_arena=False) as own:
            while not stop.is_set():
                found[own.read(rows, ["x"])["x"].packed().values.tobytes() == before] += 1

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(30):
        client.write(rows, {"x": [np.full(2000, i, np.int32) for i in range(6)]})
    stop.set()
    thread.join(10.0)
    assert found[True] and not found[False]


def test_done_rows_are_offered_again_after_a_reset_and_nothing_else_changes(bench):
    rows = bench.put([1, 2], size=1).ravel()
    for task in ("first", "second"):
        bench.write(rows, "b") if task == "second" else None
        bench.done(bench.claim(task, 2))
    part, slots = bench.control.resolve(rows[:1])
    bench.control.reset(part, "first", slots, bench.now)
    assert bench.counts("first") == [0, 1, 0, 1] and bench.counts("second") == [0, 0, 0, 2]
    assert bench.claim("first", 2).rows.tolist() == rows[:1].tolist()


def test_a_claim_over_pairs_that_was_given_back_and_made_again_runs_out_once(bench):
    rows = bench.put([1, 2], size=1).ravel()
    spread = SPREAD_CLAIM | 7
    for _ in range(2):
        claim = bench.claim("first", 2, claim_id=spread)
        assert claim.claim_id == spread
        bench.later(0.1)
        if bench.counts("first")[2] == 2 and bench.now < 0.15:
            bench.release(claim)
    bench.later(11.0)
    assert bench.counts("first") == [0, 2, 0, 0]
    assert bench.claim("first", 2).rows.tolist() == rows.tolist()


# -- streams -----------------------------------------------------------------------------------------------------------


def test_what_one_claim_leaves_is_there_for_the_next(client):
    """B49"""
    client.put("p", list(range(10)), [4] * 10, [4] * 10, values={"prompt": [[i] for i in range(10)]})
    taken, left = [], []
    for _ in range(3):
        claim = client.claim("make", 4, partition="p", worker="w", unit="groups", timeout_s=0.0)
        taken.append(list(dict.fromkeys(claim.group_ids.tolist())))
        left.append(claim.ready)
    assert [len(groups) for groups in taken] == [4, 4, 2] and left == [6, 2, 0]
    assert sorted(itertools.chain(*taken)) == list(range(10))


@pytest.mark.parametrize("unit", ["rows", "groups"])
def test_how_much_one_claim_takes_changes_neither_which_rows_a_consumer_gets_nor_how_many(served, unit):
    """B54: 8 groups of 4, two consumers that take turns, chunks of 4, 16 and 32 rows."""
    seen = {}
    for chunk in (4, 16, 32):
        name = f"{unit}{chunk}"
        with DockClient(served.address, SECRET, wait_s=5.0) as client:
            client.put(name, list(range(8)), [4] * 8, [4] * 8, values={"prompt": [[i] for i in range(8)]})
            client.seal(name)
            got: list[tuple[int, int]] = []
            count = chunk if unit == "rows" else chunk // 4
            while not (claim := client.claim("make", count, partition=name, worker="w", unit=unit)).sealed:
                got += zip(claim.group_ids.tolist(), claim.members.tolist())
                client.done(claim.claim_id)
        seen[chunk] = got
    assert seen[4] == seen[16] == seen[32] == list(itertools.product(range(8), range(4)))


@pytest.mark.parametrize("split", ["fifo", "tokens"])
def test_how_much_a_round_takes_changes_neither_the_rows_of_a_team_nor_their_number(served, split):
    """B54: two ranks; whatever the chunk, each gets half, and together they get every row once."""
    for chunk in (2, 4, 16):
        name = f"{split}{chunk}"
        shares: list[list[tuple[int, int]]] = [[], []]

        def rank(number: int, name: str = name, chunk: int = chunk, shares=shares) -> None:
            with DockClient(served.address, SECRET, wait_s=5.0) as own:
                while not (claim := own.claim("make", chunk, partition=name, worker=f"r{number}", team="t",
                                              rank=number, ranks=2, split=split)).sealed:  # fmt: skip
                    shares[number] += zip(claim.group_ids.tolist(), claim.members.tolist())
                    if claim.claim_id:
                        own.done(claim.claim_id)

        with DockClient(served.address, SECRET) as client:
            client.put(name, list(range(8)), [4] * 8, [4] * 8, values={"prompt": [[i] * (i + 1) for i in range(8)]})
            client.seal(name)
        threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
            assert not thread.is_alive()
        assert [len(share) for share in shares] == [16, 16]
        assert Counter(itertools.chain(*shares)) == Counter(itertools.product(range(8), range(4)))


def test_the_first_micro_batch_arrives_before_the_producer_has_finished(served, client):
    finished, first = [], []

    def produce() -> None:
        with DockClient(served.address, SECRET) as own:
            for _ in range(10):
                rows_of(own, 4, "stream")
                time.sleep(0.03)
            finished.append(time.monotonic())
            own.seal("stream")

    thread = threading.Thread(target=produce)
    thread.start()
    total = 0
    while not (claim := client.claim("use", 4, partition="stream", worker="w", at_least=4)).sealed:
        first.append(time.monotonic())
        total += len(claim)
        client.done(claim.claim_id)
    thread.join()
    assert total == 40 and sum(at < finished[0] for at in first) >= 8


def test_a_consumer_that_waits_is_woken_at_once(client, remote):
    delays = []
    for _ in range(20):
        got: list = []
        thread = threading.Thread(
            target=lambda: got.append((remote.claim("use", 1, partition="w", worker="w"), time.monotonic()))  # noqa: B023
        )
        thread.start()
        time.sleep(0.02)
        rows_of(client, 1, "w")
        put_at = time.monotonic()
        thread.join(5.0)
        delays.append(got[0][1] - put_at)
    assert sorted(delays)[10] < 0.05


def test_a_consumer_that_is_twice_as_fast_ends_with_about_twice_the_rows(served, client):
    counts = {}

    def consume(name: str, pause_s: float) -> None:
        counts[name] = 0
        with DockClient(served.address, SECRET, wait_s=5.0) as own:
            while not (claim := own.claim("use", 2, partition="p", worker=name)).sealed:
                time.sleep(pause_s)
                counts[name] += len(claim)
                own.done(claim.claim_id)

    rows_of(client, 120, length=1)
    client.seal("p")
    threads = [threading.Thread(target=consume, args=item, daemon=True) for item in (("fast", 0.02), ("slow", 0.04))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert counts["fast"] + counts["slow"] == 120
    assert 1.5 < counts["fast"] / counts["slow"] < 2.7


# -- the code itself ---------------------------------------------------------------------------------------------------


def test_nothing_that_a_peer_sends_can_become_code_and_no_library_setting_is_touched():
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "torch"}
    for path in Path(mindspeed_asyncflow.dock.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not forbidden & {name.partition(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, path
