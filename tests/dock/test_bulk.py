"""Values of readers and writers elsewhere: they go straight into and out of the arena, and nobody waits for them."""

import contextlib
import os
import socket
import threading
import time

import numpy as np
import pytest

from mindspeed_asyncflow.dock import channel, wire
from mindspeed_asyncflow.dock.columns import ColumnSpec, TaskSpec
from mindspeed_asyncflow.dock.pair import PairClient
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.dock.wire import Verb
from mindspeed_asyncflow.errors import DeadlineExceeded, DockFull, StaleHandle, WorkerLost

SECRET = "bulk"
MIB = 1 << 20
COLUMNS = (
    ColumnSpec("ids", "int32", "ragged", tokens=True), ColumnSpec("dense", "float32", shape=(64,)),
    ColumnSpec("odd", "uint8", "ragged"),
)  # fmt: skip
TASKS = (TaskSpec("use", ("ids", "dense")),)


@pytest.fixture
def served():
    with DockServer(COLUMNS, TASKS, arena_mb=32, secret=SECRET, lease_s=30.0, stall_s=0.5) as server:
        yield server
        assert server.failure is None


@pytest.fixture
def connect(served):
    made: list[PairClient] = []

    def make(**how) -> PairClient:
        made.append(PairClient(served.address, SECRET, wait_s=10.0, **how))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture(params=["mapped", "remote"])
def client(request, connect):
    return connect(map_arena=request.param == "mapped")


def batch(n: int, length: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "ids": [rng.integers(0, 1 << 30, max(0, length - i % 7)).astype(np.int32) for i in range(n)],
        "dense": rng.random((n, 64), np.float32),
        "odd": [rng.integers(0, 255, i % 5).astype(np.uint8) for i in range(n)],
    }


def check(got: dict, given: dict, order=None) -> None:
    order = np.arange(len(given["dense"])) if order is None else order
    for name in ("ids", "odd"):
        if name in got:
            assert all(np.array_equal(a, given[name][i]) for a, i in zip(got[name], order))
    assert np.array_equal(got["dense"], given["dense"][order])


def raw(server: DockServer) -> socket.socket:
    host, port = server.address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=10.0)
    challenge = sock.recv(wire.CHALLENGE_BYTES, socket.MSG_WAITALL)
    sock.sendall(wire.frame(Verb.HELLO, 0, 1, 0, {"answer": wire.answer(SECRET.encode(), challenge)}))
    sock.recv(1 << 16)
    return sock


def reserve(sock: socket.socket, nbytes: int) -> int:
    message = {"columns": ["odd"], "lengths": np.array([nbytes]), "put": True, "rows": 1, "groups": 1, "timeout_s": 0.0}
    sock.sendall(wire.frame(Verb.RESERVE, 0, 9, 1, message))
    data = sock.recv(1 << 16)
    header = wire.decode_header(data, wire.MAX_BODY)
    return wire.decode_body(header, memoryview(data)[wire.HEADER.size :]).whole("reservation")


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "it did not come about within 10 s"
        time.sleep(0.002)


@pytest.mark.parametrize(("n", "length"), [(3, 9), (64, 3000), (500, 20), (2, 500_000)])
def test_large_and_small_batches_arrive_to_the_bit_in_any_order_with_one_message_per_get(client, n, length):
    given = batch(n, length)
    rows = client.put("p", values=given)[0]
    claim = client.claim("use", n, partition="p", worker="w", columns=("ids", "dense"), timeout_s=0.0)
    assert np.array_equal(claim.rows, rows)
    check(claim.values, given)
    order = np.random.default_rng(1).permutation(n)
    check(client.read(rows[order], ["ids", "odd", "dense"]), given, order)
    check(client.read(rows[order], ["odd", "dense"], copy=True), given, order)
    client.done(claim.claim_id)
    client.free(rows)
    assert client.stats()["used_bytes"] == 0


def test_a_claim_brings_its_values_also_when_it_had_to_wait(client, connect):
    given, got = batch(8, 5000), []
    waiting = threading.Thread(
        target=lambda: got.append(client.claim("use", 8, partition="p", worker="w", columns=["dense", "ids"]))
    )
    waiting.start()
    wait_until(lambda: connect().stats()["waiting"])
    connect().put("p", values=given)
    waiting.join(10.0)
    check(got[0].values, given)


def test_a_claim_brings_only_columns_that_its_task_reads_and_takes_nothing_when_asked_for_others(client):
    client.put("p", values=batch(2, 5))
    for columns in (["odd"], ["ids", "none"]):
        with pytest.raises(Exception, match="does not read"):
            client.claim("use", 2, partition="p", worker="w", columns=columns)
    claim = client.claim("use", 2, partition="p", worker="w", timeout_s=0.0)
    assert len(claim) == 2 and claim.values is None


def test_a_repeated_claim_brings_its_values_too(client, monkeypatch):
    """The answer is lost, the claim is asked again under its identity: the same rows, read anew."""
    given, lost = batch(8, 4000), []
    rows = client.put("p", values=given)[0]
    decode = channel.wire.decode_header

    def lose_once(raw, most_bytes, most_bulk=0):
        header = decode(raw, most_bytes, most_bulk)
        if threading.get_ident() == ours and header.verb == Verb.CLAIM and not lost:
            lost.append(header)
            raise wire.WireError("lost on the way")
        return header

    ours = threading.get_ident()
    monkeypatch.setattr(channel.wire, "decode_header", lose_once)
    claim = client.claim("use", 8, partition="p", worker="w", columns=["ids", "dense"])
    assert lost and claim.rows.tolist() == rows.tolist() and client.stats()["claims"] == 1
    check(claim.values, given)


def test_copies_of_local_readers_are_their_own_and_verified(connect, monkeypatch):
    """A row that is freed while it is copied is a stale handle, never another row's bytes."""
    client, other = connect(), connect()
    given = batch(4, 100)
    rows = client.put("p", values=given)[0]
    got = client.read(rows, ["dense", "ids"], copy=True)
    copied = client._copied

    def slow_copy(cells):
        monkeypatch.setattr(client, "_copied", copied)
        other.free(rows)
        other.put("p", values=batch(4, 100, seed=5))
        return copied(cells)

    monkeypatch.setattr(client, "_copied", slow_copy)
    with pytest.raises(StaleHandle):
        client.read(rows, ["dense", "ids"], copy=True)
    check(got, given)


def test_received_buffers_are_used_again(connect):
    client = connect(map_arena=False)
    rows = client.put("p", values=batch(8, 20_000))[0]
    for _ in range(50):
        client.read(rows, ["ids"])
    assert client._pool.made <= 2
    held = [client.read(rows, ["ids"]) for _ in range(3)]
    assert client._pool.made >= 3 and all(np.array_equal(h["ids"][0], held[0]["ids"][0]) for h in held)


def test_a_bulk_that_does_not_fit_its_reservation_closes_the_connection_and_frees_it(served, connect):
    client = connect()
    for nbytes in (MIB - 1, MIB + 1, 1 << 39, 0):
        with raw(served) as sock:
            number = reserve(sock, MIB)
            assert client.stats()["reserved_bytes"] == MIB
            message = {"partition": "p", "count": 1, "reservation": number, "timeout_s": 0.0}
            if nbytes:
                sock.sendall(wire.frame(Verb.PUT, 0, 9, 2, message, nbytes))
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
        wait_until(lambda: not client.stats()["reserved_bytes"])
    with raw(served) as sock, raw(served) as thief:
        number = reserve(sock, MIB)
        message = {"partition": "p", "count": 1, "reservation": number, "timeout_s": 0.0}
        thief.sendall(wire.frame(Verb.PUT, 0, 10, 2, message, MIB))
        with contextlib.suppress(ConnectionResetError):
            assert thief.recv(1) == b"", "another connection's reservation is not for it"


def test_a_writer_that_dies_in_the_middle_of_its_bulk_leaves_nothing(served, connect):
    client = connect()
    with raw(served) as sock:
        number = reserve(sock, 8 * MIB)
        message = {"partition": "p", "count": 1, "reservation": number, "timeout_s": 0.0}
        sock.sendall(wire.frame(Verb.PUT, 0, 9, 2, message, 8 * MIB) + bytes(3 * MIB))
        assert client.stats()["reserved_bytes"] == 8 * MIB
    wait_until(lambda: not client.stats()["reserved_bytes"])
    assert client.stats()["live_rows"] == 0


def test_a_reader_that_takes_nothing_is_closed_and_its_rows_are_let_go(served, connect):
    """Its answers stay where they are, in the arena: the server does not grow, and pins end with the deadline."""
    client = connect()
    rows = client.put("p", values={"odd": [np.zeros(6 * MIB, np.uint8)] * 3})[0]
    used, memory = client.stats()["used_bytes"], rss_mib()
    sock = raw(served)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    ask = wire.frame(Verb.READ, 0, 9, 1, {"rows": rows, "columns": ["odd"], "copy": True})
    for _ in range(50):
        sock.sendall(ask)
    time.sleep(0.1)
    client.free(rows)
    assert client.stats()["used_bytes"] == used, "bytes that are on their way stay"
    assert rss_mib() - memory < 4
    wait_until(lambda: client.stats()["used_bytes"] == 0)
    sock.close()


def rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def test_a_row_freed_while_it_is_sent_arrives_whole(served, connect):
    client = connect()
    value = np.random.default_rng(0).integers(0, 255, 12 * MIB).astype(np.uint8)
    rows = client.put("p", values={"odd": [value]})[0]
    with raw(served) as sock:
        sock.sendall(wire.frame(Verb.READ, 0, 9, 1, {"rows": rows, "columns": ["odd"], "copy": True}))
        time.sleep(0.05)
        client.free(rows)
        client.put("p", values={"odd": [np.zeros(11 * MIB, np.uint8)]})
        header = wire.decode_header(sock.recv(wire.HEADER.size, socket.MSG_WAITALL), wire.MAX_BODY, wire.MAX_BULK)
        sock.recv(header.body_bytes, socket.MSG_WAITALL)
        got = bytearray(header.bulk_bytes)
        view = memoryview(got)
        while len(view):
            view = view[sock.recv_into(view) :]
    assert bytes(got[: 12 * MIB]) == value.tobytes()
    wait_until(lambda: client.stats()["used_bytes"] == 11 * MIB)


def test_bulk_on_its_way_delays_no_small_call(served, connect):
    """Two readers stream 12 MiB answers; the calls of another client still take a few milliseconds at most."""
    client, stop = connect(), threading.Event()
    rows = client.put("p", values={"odd": [np.zeros(6 * MIB, np.uint8)] * 2})[0]

    def stream() -> None:
        reader = connect(map_arena=False)
        while not stop.is_set():
            reader.read(rows, ["odd"])

    readers = [threading.Thread(target=stream) for _ in range(2)]
    for reader in readers:
        reader.start()
    times = []
    for _ in range(60):
        begun = time.perf_counter()
        client.free(np.empty(0, np.int64))
        client.seal("other")
        times.append(time.perf_counter() - begun)
    stop.set()
    for reader in readers:
        reader.join(10.0)
    assert np.median(times) < 0.02


def test_puts_wait_for_rows_as_they_wait_for_bytes_and_too_many_are_refused_at_once():
    with (
        DockServer(COLUMNS, TASKS, arena_mb=4, secret=SECRET, max_rows=10) as server,
        PairClient(server.address, SECRET, wait_s=10.0) as client,
    ):
        with pytest.raises(DockFull, match=r"dock\.max_rows"):
            client.put("p", values=batch(11, 3), timeout_s=60.0)
        first = client.put("p", values=batch(6, 3))[0]
        assert client.live_rows == 6 and 0 < client.free_bytes < 4 * MIB
        for length in (3, 40_000):  # in the frame, and reserved
            with pytest.raises(DeadlineExceeded, match=r"room for 5 rows .*dock\.max_rows is 10"):
                client.put("p", values=batch(5, length), timeout_s=0.05)
        threading.Timer(0.1, lambda: client.free(first)).start()
        begun = time.monotonic()
        client.put("p", values=batch(5, 3), timeout_s=5.0)
        assert 0.05 < time.monotonic() - begun < 4.0
        assert client.stats()["live_rows"] == 5 and client.stats()["back_pressure_s"] > 0.05


def test_a_put_finds_room_in_pieces_when_no_single_run_is_long_enough(client):
    """Half of the arena is free, in runs of 1 MiB: a put of 8 MiB is divided over them, and comes back whole."""
    blocks = [client.put("p", values={"odd": [np.full(MIB, i, np.uint8)]})[0] for i in range(22)]
    for block in blocks[::2]:
        client.free(block)
    given = {"odd": [np.full(400_000, i, np.uint8) for i in range(20)], "ids": [np.arange(2000, dtype=np.int32)] * 20}
    rows = client.put("p", values=given, timeout_s=0.0)[0]
    got = client.read(rows, ["odd", "ids"])
    assert all(np.array_equal(a, b) for name in given for a, b in zip(got[name], given[name]))
    client.free(np.concatenate([rows, *blocks[1::2]]))
    assert client.stats()["used_bytes"] == 0


def test_bytes_freed_are_bytes_cleared_and_little_more_than_the_payload_is_held(client):
    """62 of 64 rows of every batch are freed: their bytes are back, up to the granules that they share."""
    batches = [client.put("p", values=batch(64, 1500, seed=i))[0] for i in range(20)]
    stats = client.stats()
    assert stats["peak_bytes"] <= 1.10 * stats["payload_bytes"] and stats["used_bytes"] <= 1.10 * stats["payload_bytes"]
    full = stats["used_bytes"]
    client.free(np.concatenate([rows[1:-1] for rows in batches]))
    assert (full - client.stats()["used_bytes"]) / full == pytest.approx(62 / 64, abs=0.003)
    client.close_partition("p")
    stats = client.stats()
    assert stats["used_bytes"] == stats["payload_bytes"] == stats["live_rows"] == 0 and "p" not in stats["partitions"]


def test_versions_come_with_the_put_before_anybody_is_offered_the_rows(client):
    versions = (np.array([1, 5], np.int32), np.array([3, 6], np.int32))
    rows = client.put("p", values=batch(2, 3), versions=versions)[0]
    claim = client.claim("use", 2, partition="p", worker="w", min_version=2, timeout_s=0.0)
    assert claim.rows.tolist() == [rows[1]] and (claim.version_min[0], claim.version_max[0]) == (5, 6)
    assert [(group < 0, dropped.tolist(), why) for group, dropped, why in claim.dropped] == [(True, [rows[0]], "stale")]


def test_a_pair_that_is_gone_is_named_after_the_time_that_a_restart_may_take(served):
    with PairClient(served.address, SECRET, wait_s=5.0, restart_s=0.3) as client:
        served.close()
        begun = time.monotonic()
        with pytest.raises(WorkerLost, match=rf"pair 0 at {client.address} .*0\.3 s"):
            client.put("p", values=batch(2, 3))
        assert 0.2 < time.monotonic() - begun < 2.0


def test_the_second_large_put_of_a_client_is_one_message_and_room_ahead_is_bounded_by_half_the_arena(connect):
    client = connect()
    verbs: list[str] = []
    channel = client._channel(False)
    original = channel.call
    channel.call = lambda verb, *a, **k: (verbs.append(verb.name), original(verb, *a, **k))[1]
    client._keep(channel)
    values = {"ids": [np.arange(60_000, dtype=np.int32)] * 2}
    for _ in range(3):
        client.put("p", values=values)
    assert verbs == ["RESERVE", "PUT", "PUT", "PUT"]
    while client.stats()["reserved_bytes"]:
        client.put("p", values=values)
    stats = client.stats()
    assert stats["used_bytes"] <= 0.5 * stats["arena_bytes"] < stats["used_bytes"] + 480_000 * 2
    client.put("p", values=values)
    assert verbs[-2:] == ["RESERVE", "PUT"]


def test_room_ahead_of_a_client_that_leaves_or_needs_more_is_free_again(connect):
    client = connect()
    client.put("p", values={"ids": [np.arange(60_000, dtype=np.int32)]})
    assert client.stats()["reserved_bytes"] == 240_000
    rows = client.put("p", values={"ids": [np.arange(90_000, dtype=np.int32)]})[0]
    assert client.stats()["reserved_bytes"] == 360_000, "one stretch for the next call, as long as this one"
    client.put("p", values={"ids": [np.arange(50_000, dtype=np.int32)]})
    assert client.stats()["reserved_bytes"] == 200_000, "what a shorter call leaves of its stretch is free"
    assert np.array_equal(client.read(rows, ["ids"])["ids"][0], np.arange(90_000))
    other = connect()
    client.close()
    wait_until(lambda: not other.stats()["reserved_bytes"])
