"""Rules of the relay server: what is no question of ours ends the connection, and only that one."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.channel import Broken
from mindspeed_asyncflow.errors import PlatformError, WeightSyncError
from mindspeed_asyncflow.reshard.relay_link import MOST_RANGES, Question, RelayLink
from mindspeed_asyncflow.reshard.relay_server import RelayServer
from tests.reshard.whole_writer import WholeWriter

SECRET = b"of this run"


@pytest.fixture
def server() -> Iterator[RelayServer]:
    path = f"/dev/shm/asyncflow-test-{uuid.uuid4().hex}"
    with WholeWriter(path) as writer:
        writer.publish(1, [("w", torch.arange(6.0).reshape(2, 3)), ("v", torch.ones(5))])
        with RelayServer(path, SECRET) as made:
            yield made
    assert not os.path.exists(path)


def link(server: RelayServer) -> RelayLink:
    return RelayLink(server.address, SECRET, 5.0, lambda _: None)


def fetch(*ranges: tuple[int, int, int], **changes: object) -> dict:
    return {"version": 1, "anchor": -1, "block": 2, "ranges": np.array(ranges, np.int64).reshape(-1, 3).T, **changes}


def serves(server: RelayServer) -> bool:
    with link(server) as good:
        good.ask(Question.FETCH, fetch((0, 4, 12), (1, 0, 4)))
        answer, nbytes = good.answer()
        got = bytearray(nbytes)
        good.into(memoryview(got))
        return answer["sizes"].tolist() == [8, 4] and struct.unpack("<3f", got) == (1.0, 2.0, 1.0)


@pytest.mark.parametrize(
    "question",
    [
        fetch((2, 0, 1)),
        fetch((-1, 0, 1)),
        fetch((0, 0, 25)),
        fetch((0, -4, 4)),
        fetch((0, 8, 4)),
        fetch(),
        fetch(*[(0, 0, 1)] * (MOST_RANGES + 1)),
        fetch((0, 0, 4), block=3, anchor=1),
        fetch((0, 0, 4), version="1"),
        {"version": 1},
    ],
)
def test_a_request_for_what_is_not_there_closes_the_connection(server: RelayServer, question: dict) -> None:
    with link(server) as bad, pytest.raises(Broken):
        bad.ask(Question.FETCH, question)
        bad.answer()
    assert server.bad_frames == 1
    assert serves(server)


def test_a_question_that_is_none_closes_the_connection(server: RelayServer) -> None:
    for verb in (0, 9, int(Question.HELLO)):
        with link(server) as bad, pytest.raises(Broken):
            bad.ask(verb, {})  # type: ignore[arg-type]
            bad.answer()
    assert server.bad_frames == 3
    assert serves(server)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 4, b"\0" * 64, os.urandom(200)])
def test_garbage_instead_of_a_greeting_closes_the_connection(server: RelayServer, garbage: bytes) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as sock:
        assert len(sock.recv(64)) == wire.CHALLENGE_BYTES
        sock.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(64) == b""
    assert serves(server)


def test_a_greeting_that_announces_much_is_not_waited_for(server: RelayServer) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as sock:
        sock.recv(64)
        sock.sendall(wire.HEADER.pack(wire.MAGIC, wire.VERSION, 1, 0, 0, 0, 0, 1 << 30, 0))
        assert sock.recv(64) == b""
    assert server.bad_frames == 1


def test_a_connection_that_is_cut_is_closed_even_before_it_began(server: RelayServer) -> None:
    host, _, port = server.address.rpartition(":")
    for _ in range(30):
        with socket.create_connection((host, int(port)), timeout=2.0) as sock:
            server.drop_connections()
            with contextlib.suppress(ConnectionResetError):
                while server._connections or sock.recv(64):  # may have been accepted after the cut
                    server.drop_connections()
    assert serves(server)


def test_an_unknown_version_is_answered_with_those_kept_and_the_connection_goes_on(server: RelayServer) -> None:
    with link(server) as good:
        for question, message in [(Question.INFO, {"version": 5}), (Question.FETCH, fetch((0, 0, 4), version=5))]:
            good.ask(question, message)
            with pytest.raises(WeightSyncError, match=r"version 5 is not in the relay .* keeps 1:"):
                good.answer()
        good.ask(Question.INFO, {"version": -1})
        assert good.answer()[0]["version"] == 1


def test_a_relay_that_is_missing_or_a_port_in_use_is_named(server: RelayServer) -> None:
    with pytest.raises(WeightSyncError, match="No such file"):
        RelayServer("/dev/shm/asyncflow-test-none", SECRET)
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(PlatformError, match=r"cannot be bound.*placement\.hccl_port_range"):
        RelayServer(server._file.path, SECRET, ports=range(port, port + 1))


def test_a_slowed_link_passes_no_more_than_it_should(server: RelayServer) -> None:
    slow = RelayServer(server._file.path, SECRET, bytes_per_s=20_000)
    try:
        with link(slow) as good:
            began = time.monotonic()
            for _ in range(20):
                good.ask(Question.FETCH, fetch((0, 0, 24)))
                _, nbytes = good.answer()
                good.into(memoryview(bytearray(nbytes)))
            took = time.monotonic() - began
        assert took > 0.9 * slow.sent_bytes / 20_000 - 0.1
    finally:
        slow.close()
