"""Ten thousand malformed frames against a pair in a process of its own, while others work with it."""

import multiprocessing
import os
import random
import select
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import pytest

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.columns import ColumnSpec, TaskSpec
from mindspeed_asyncflow.dock.pair import PairClient
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.dock.wire import HEADER, Verb

SECRET = "of the fuzzed pair"
FRAMES = 10_000
MIB = 1 << 20
COLUMNS = (ColumnSpec("ids", "int32", "ragged", tokens=True), ColumnSpec("note", "uint8", "text"))
TASKS = (TaskSpec("use", ("ids",)),)


def serve(pipe: Connection) -> None:
    with DockServer(COLUMNS, TASKS, arena_mb=8, secret=SECRET) as server:
        pipe.send((server.address, server.arena_path))
        pipe.recv()
        pipe.send((repr(server.failure), server.bad_frames))


def rss_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def good_frames() -> list[tuple[Verb, dict]]:
    put = {
        "partition": "fuzz", "columns": ["ids", "note"], "lengths": np.array([3, 0, 2, 1]), "timeout_s": 0.0,
        "reservation": 0, "data": np.zeros(15, np.uint8), "count": 2,
    }  # fmt: skip
    claim = {
        "task": "use", "partition": "fuzz", "count": 1, "worker": "fuzz", "unit": "rows", "policy": "fifo",
        "group_ids": None, "min_version": None, "timeout_s": 0.0, "at_least": 1, "columns": ["ids"], "copy": True,
        "max_age_s": None, "seed": 0, "team": "", "rank": 0, "ranks": 1, "split": "same",
    }  # fmt: skip
    rows = np.arange(4)
    return [
        (Verb.PUT, put), (Verb.CLAIM, claim), (Verb.RESERVE, put | {"put": True, "rows": 2, "groups": 2}),
        (Verb.READ, {"rows": rows, "columns": ["ids"], "copy": True}),
        (Verb.WRITE, put | {"rows": rows[:2], "claim_id": None, "done": False}),
        (Verb.DONE, {"claim_id": 1, "task": "use", "rows": rows}), (Verb.RELEASE, {"claim_id": 1, "rows": None}),
        (Verb.DROP, {"group_ids": rows, "partition": "fuzz", "reason": "x"}), (Verb.FREE, {"rows": rows}),
        (Verb.SEAL, {"partition": "fuzz2"}), (Verb.CLOSE, {"partition": "fuzz"}), (Verb.FORGET, {"worker": "fuzz"}),
        (Verb.FINISH, {"task": "use", "rows": rows}), (Verb.CHECK, {"rows": rows}), (Verb.STATS, {}),
        (Verb.TASK, {"name": "use", "columns": ["note"]}), (Verb.HELLO, {"answer": np.zeros(32, np.uint8)}),
    ]  # fmt: skip


HOSTILE = (
    None, True, -1, 0, 1 << 63, -(1 << 63), 1e308, float("nan"), float("inf"), "", "\x00" * 9, [], [[]], {}, ["ids"],
    {"a": [1]}, np.zeros(0, np.int64), np.full(3, -1), np.full(2, (1 << 63) - 1), np.full(2, -(1 << 63)),
    np.arange(1 << 10), np.zeros((2, 2), np.int64), np.zeros(3, np.float64), np.zeros(2, np.int32),
)  # fmt: skip


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.good = good_frames()
        self.request = 0

    def frame(self) -> bytes:
        """One malformed frame, or one whose values make no sense."""
        rng = self.rng
        self.request += 1
        verb, message = rng.choice(self.good)
        make = rng.choice((self.noise, self.header, self.body, self.hostile, self.hostile, self.bulk, self.described))
        return make(verb, dict(message))

    def whole(self, verb: int, message: dict, bulk: int = 0) -> bytearray:
        return bytearray(wire.frame(verb, 0, 77, self.request, message, bulk))

    def noise(self, verb: Verb, message: dict) -> bytes:
        return self.rng.randbytes(self.rng.randrange(1, 300))

    def header(self, verb: Verb, message: dict) -> bytes:
        """Another magic, version or verb, and sizes up to the largest."""
        raw = self.whole(verb, message)
        fields = list(HEADER.unpack_from(raw))
        at = self.rng.randrange(len(fields))
        fields[at] = b"XXXX" if at == 0 else self.rng.choice((0, 1, 7, 99, (1 << 16) - 1))
        if at >= 7:
            fields[at] = self.rng.choice((1, 1 << 20, 1 << 40, (1 << 64) - 1))
        raw[: HEADER.size] = HEADER.pack(*fields)
        return bytes(raw)

    def body(self, verb: Verb, message: dict) -> bytes:
        """Flipped bytes; sometimes cut short."""
        raw = self.whole(verb, message)
        for _ in range(self.rng.randint(1, 6)):
            raw[self.rng.randrange(HEADER.size, len(raw))] = self.rng.randrange(256)
        return bytes(raw[: self.rng.randrange(1, len(raw))] if self.rng.random() < 0.2 else raw)

    def hostile(self, verb: Verb, message: dict) -> bytes:
        """A valid frame with values that no client sends."""
        for _ in range(self.rng.randint(1, 2)):
            if message:
                message[self.rng.choice(list(message))] = self.rng.choice(HOSTILE)
        if self.rng.random() < 0.1 and message:
            del message[self.rng.choice(list(message))]
        if isinstance(message.get("timeout_s"), float) and message["timeout_s"] > 1:
            message["timeout_s"] = 0.0
        return bytes(self.whole(self.rng.choice((verb, verb, self.rng.randrange(1, 30))), message))

    def bulk(self, verb: Verb, message: dict) -> bytes:
        """Bulk that was not reserved, or belongs to no verb."""
        size = self.rng.choice((1, 8, 1 << 16, 1 << 39))
        message["reservation"] = self.rng.choice((0, 1, 2, 5, 1 << 40))
        return bytes(self.whole(verb, message, size)) + self.rng.randbytes(min(size, 64))

    def described(self, verb: Verb, message: dict) -> bytes:
        """A description that lies about its arrays, nests without end, or is of another kind."""
        text = self.rng.choice((
            msgspec.msgpack.encode([{}, [["rows", "int64", [1 << 50]]]]),
            msgspec.msgpack.encode([{}, [["rows", "object", [1]]]]),
            msgspec.msgpack.encode([{}, [["rows", "int64", [-1]]] * 300]),
            msgspec.msgpack.encode([{"rows": msgspec.msgpack.Ext(3, b"code")}, []]),
            msgspec.msgpack.encode({"rows": 1}), b"\x92\x81\xa1a" + b"\x91" * 3000 + b"\x90", b"\xdf\xff\xff\xff\xff",
        ))  # fmt: skip
        padded = text + bytes(-len(text) % 8)
        return HEADER.pack(wire.MAGIC, wire.VERSION, verb, 0, len(text), 1, self.request, len(padded), 0) + padded


def open_raw(address: str, trusted: bool) -> socket.socket:
    host, port = address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=5.0)
    challenge = sock.recv(wire.CHALLENGE_BYTES, socket.MSG_WAITALL)
    if trusted:
        sock.sendall(wire.frame(Verb.HELLO, 0, 1, 0, {"answer": wire.answer(SECRET.encode(), challenge)}))
        sock.recv(1 << 16)
    return sock


def attack(address: str, frames: int, seed: int) -> int:
    """Sends so many frames, each connection until the server closes it; returns how many connections it took."""
    fuzzer, sent, connections, sock = Fuzzer(seed), 0, 0, None
    while sent < frames:
        if sock is None:
            sock = open_raw(address, fuzzer.rng.random() < 0.95)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connections += 1
        try:
            sock.sendall(fuzzer.frame())
            sent += 1
            ready = select.select([sock], [], [], 0.0 if fuzzer.rng.random() < 0.9 else 0.0005)[0]
            gone = bool(ready) and not sock.recv(1 << 16)
        except OSError:
            gone = True
        if gone or fuzzer.rng.random() < 0.1:
            sock.close()
            sock = None
    if sock is not None:
        sock.close()
    return connections


class Worker(threading.Thread):
    """A well-behaved client: its rows must come back as they were, all the time."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address, self.rounds, self.stop, self.wrong = address, 0, False, []

    def run(self) -> None:
        rng = np.random.default_rng(0)
        with PairClient(self.address, SECRET, wait_s=10.0) as client:
            while not self.stop:
                ids = [rng.integers(0, 1 << 30, int(k)).astype(np.int32) for k in rng.integers(0, 3000, 8)]
                rows = client.put("work", values={"ids": ids, "note": [str(self.rounds)] * 8})[0]
                claim = client.claim("use", 8, partition="work", worker="good", columns=["ids"], at_least=8)
                notes = client.read(claim.rows, ["note"], copy=True)["note"]
                fine = claim.values is not None and all(map(np.array_equal, claim.values["ids"], ids))
                if not fine or notes != [str(self.rounds)] * 8 or claim.rows.tolist() != rows.tolist():
                    self.wrong.append(self.rounds)
                client.done(claim.claim_id)
                client.free(rows)
                self.rounds += 1


@pytest.mark.slow
def test_ten_thousand_malformed_frames_change_nothing_for_anybody(record_property, capsys):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    try:
        address, arena = ours.recv()
        kept = {"ids": [np.arange(k, dtype=np.int32) for k in range(50)], "note": [f"row {k}" for k in range(50)]}
        with PairClient(address, SECRET, wait_s=10.0) as client:
            rows = client.put("kept", values=kept)[0]
            worker = Worker(address)
            worker.start()
            attack(address, 500, seed=1)  # what is allocated once
            files, memory = len(os.listdir(f"/proc/{process.pid}/fd")), rss_mib(process.pid)
            begun = time.monotonic()
            connections = attack(address, FRAMES, seed=2)
            seconds = time.monotonic() - begun
            worker.stop = True
            worker.join(20.0)
            deadline = time.monotonic() + 5.0
            while len(os.listdir(f"/proc/{process.pid}/fd")) > files and time.monotonic() < deadline:
                time.sleep(0.01)
            grown = rss_mib(process.pid) - memory
            more_files = len(os.listdir(f"/proc/{process.pid}/fd")) - files
            got = client.read(rows, ["ids", "note"])
            assert got["note"] == kept["note"] and all(map(np.array_equal, got["ids"], kept["ids"]))
            stats = client.stats()
            assert stats["partitions"]["kept"]["rows"] == 50
            client.free(rows)
            after = client.stats()
            assert after["partitions"]["kept"]["rows"] == after["partitions"]["work"]["rows"] == 0
            assert after["used_bytes"] < 1 << 20, "beside what the fuzzer itself put, nothing is held"
        ours.send("end")
        failure, bad = ours.recv()
    finally:
        if process.is_alive() and not process.join(5.0):
            process.terminate()
        process.join(5.0)
    figures = {
        "frames": FRAMES, "connections": connections, "refused": bad, "seconds": round(seconds, 1),
        "rss_growth_mib": round(grown, 2), "fd_growth": more_files, "rounds_of_the_other": worker.rounds,
    }  # fmt: skip
    record_property("figures", str(figures))
    with capsys.disabled():
        print(f"\n  fuzz: {figures}")
    assert failure == "None" and bad > FRAMES // 20
    assert not worker.wrong and worker.rounds > 20
    assert grown < 16 and more_files <= 0
    assert not os.path.exists(arena)
