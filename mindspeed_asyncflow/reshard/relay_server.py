"""Serves the versions of a node's relay to mirrors on other nodes. One thread, one asyncio loop, no copy of weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.wire import HEADER, Message, WireError
from mindspeed_asyncflow.errors import AsyncFlowError, WeightSyncError
from mindspeed_asyncflow.platforms.ports import hold_port
from mindspeed_asyncflow.reshard import delta
from mindspeed_asyncflow.reshard.relay_file import RelayFile
from mindspeed_asyncflow.reshard.relay_link import (
    MOST_FETCH_BYTES,
    MOST_QUESTION_BYTES,
    MOST_RANGES,
    NEWEST,
    NO_ANCHOR,
    Question,
)
from mindspeed_asyncflow.reshard.relay_table import RelayTable

_GREETING_S = 5.0
_GREETING_BYTES = 4096
_STALL_S = 60.0  # a mirror that takes nothing for so long is let go
_PIECE = 1 << 20  # bytes handed to the kernel at once
_PIECES_PER_S = 20  # on a link that is slowed


class RelayServer:
    """`path`: the relay of this node, which must exist; one that is made anew there is served from then on.

    `ports`: it listens on the first of them that is free; 0 is any free one.
    `secret`: as the run's dock. `bytes_per_s`: slows all links together, for tests and measurements. Raises
    `WeightSyncError`, `PlatformError`.
    """

    def __init__(
        self,
        path: str,
        secret: bytes,
        host: str = "127.0.0.1",
        ports: range = range(1),
        bytes_per_s: float | None = None,
    ) -> None:
        self._file = RelayFile.look(path)
        self._secret, self._bytes_per_s = secret, bytes_per_s
        self._free_at = 0.0  # when the slowed link has sent what it was given
        self.sent_bytes = 0  # of answers with their ranges
        self.bad_frames = 0
        knob = "placement.hccl_port_range"
        self._listener = socket.socket(
            fileno=hold_port(ports.start, host=host, attempts=len(ports), knob=knob).detach()
        )
        self._listener.setblocking(False)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])  # host:port
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task] = set()
        self._accepting = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name="relay-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and all connections. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._accepting.cancel)
            self._thread.join(10.0)
        self._listener.close()

    def drop_connections(self) -> None:
        """Cut every connection, as a link that fails does."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._connections])

    def __enter__(self) -> RelayServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the loop --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._loop.run_until_complete(asyncio.wait([self._accepting]))
        if self._connections:
            for task in self._connections:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(self._connections))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _accept(self) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(self._listener)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._serve(sock))
            self._connections.add(task)
            task.add_done_callback(partial(self._ended, sock))

    def _ended(self, sock: socket.socket, task: asyncio.Task) -> None:
        """Also of a task that was cancelled before it began: its mirror must not wait for a greeting."""
        self._connections.discard(task)
        sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        """One connection until it ends. What is no question of ours closes it."""
        try:
            await asyncio.wait_for(self._greet(sock), _GREETING_S)
            while True:
                request, question, message = await self._next(sock, MOST_QUESTION_BYTES)
                await self._answer(sock, request, question, message)
        except WireError:
            self.bad_frames += 1
        except (OSError, EOFError, asyncio.TimeoutError):  # gone, or takes nothing any more
            return

    async def _greet(self, sock: socket.socket) -> None:
        challenge = secrets.token_bytes(wire.CHALLENGE_BYTES)
        await self._loop.sock_sendall(sock, challenge)
        request, question, message = await self._next(sock, _GREETING_BYTES)
        given = message.array("answer", "uint8")
        if question != Question.HELLO or not wire.knows_secret(self._secret, challenge, given):
            raise WireError("the greeting is wrong")
        await self._send(sock, wire.encode(question, 0, 0, request, {}))

    async def _next(self, sock: socket.socket, most_bytes: int) -> tuple[int, int, Message]:
        header = wire.decode_header(await self._exactly(sock, HEADER.size), most_bytes)
        body = await self._exactly(sock, header.body_bytes)
        return header.request, header.verb, wire.decode_body(header, memoryview(body))

    async def _exactly(self, sock: socket.socket, nbytes: int) -> bytearray:
        buffer = bytearray(nbytes)
        view = memoryview(buffer)
        while len(view):
            count = await self._loop.sock_recv_into(sock, view)
            if not count:
                raise EOFError
            view = view[count:]
        return buffer

    # -- answers ---------------------------------------------------------------------------------------------------

    async def _answer(self, sock: socket.socket, request: int, question: int, message: Message) -> None:
        bulk: Sequence[bytes | memoryview] = ()
        reply: Mapping[str, Any]
        status = 0
        try:
            if question == Question.INFO:
                reply = self._info(message.whole("version"))
            elif question == Question.TABLE:
                reply = {"text": np.frombuffer(self._present().table.text, np.uint8)}
            elif question == Question.FETCH:
                reply, bulk = await self._fetch(message)
            else:
                raise WireError(f"unknown question {question}")
        except WireError:
            raise
        except AsyncFlowError as error:
            status, reply = 1, {"error": type(error).__name__, "text": str(error)}
        frame = wire.encode(question, status, 0, request, reply, sum(map(len, bulk)))
        await self._send(sock, [*frame, *bulk])

    def _present(self) -> RelayFile:
        """The relay that is at the path now: writers that start again make a new one. While there is none: the last."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._file.path).st_ino != self._file.inode:
                self._file = RelayFile.look(self._file.path)
        return self._file

    def _info(self, version: int) -> dict[str, Any]:
        file = self._present()
        kept = file.versions()
        if version == NEWEST:
            if not kept:
                raise WeightSyncError(f"the relay {file.path} keeps no complete version yet")
            version = kept[-1]
        slot = file.slot_of(version)
        crc, present = file.crc[slot].copy(), file.present[slot].copy()
        file.check(slot, version)
        return {
            "version": version,
            "digest": np.frombuffer(file.table.digest, np.uint8),
            "crc": crc,
            "present": present,
        }

    async def _fetch(self, message: Message) -> tuple[dict[str, Any], list[bytes | memoryview]]:
        file = self._present()
        ranges = message.matrix("ranges", 3)
        _check(ranges, file.table)
        version, anchor, block = message.whole("version"), message.whole("anchor"), message.whole("block")
        start = file.payload_at(file.slot_of(version))
        before = file.payload_at(file.slot_of(anchor)) if anchor in file.versions() and anchor != NO_ANCHOR else None
        offsets = np.array([file.table.shards[shard].offset for shard in ranges[0].tolist()], np.int64)
        spans = list(zip((offsets + ranges[1]).tolist(), (offsets + ranges[2]).tolist()))
        raw = [file.bytes[start + begin : start + end] for begin, end in spans]
        bulk: list[bytes | memoryview] = [r.data for r in raw]
        deltas = np.zeros(len(raw), np.uint8)
        if before is not None:
            if block not in delta.BLOCKS:
                raise WireError(f"no delta has blocks of {block} bytes")
            anchors = [file.bytes[before + begin : before + end] for begin, end in spans]
            made = await asyncio.to_thread(lambda: [delta.encode(a, r, block) for a, r in zip(anchors, raw)])
            bulk = [full if short is None else short for full, short in zip(bulk, made)]
            deltas = np.array([short is not None for short in made], np.uint8)
        return {"sizes": np.array([len(b) for b in bulk], np.int64), "deltas": deltas}, bulk

    async def _send(self, sock: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
        """All buffers in order; small ones together, large ones in pieces."""
        most = _PIECE if self._bytes_per_s is None else max(1, min(_PIECE, int(self._bytes_per_s / _PIECES_PER_S)))
        waiting = bytearray()
        for buffer in buffers:
            if len(waiting) + len(buffer) <= most:
                waiting += buffer
                continue
            await self._pieces(sock, waiting, most)
            await self._pieces(sock, buffer, most)
            waiting = bytearray()
        await self._pieces(sock, waiting, most)

    async def _pieces(self, sock: socket.socket, buffer: bytes | bytearray | memoryview, most: int) -> None:
        view = memoryview(buffer)
        for begin in range(0, len(view), most):
            piece = view[begin : begin + most]
            if self._bytes_per_s is not None:
                now = time.monotonic()
                self._free_at = max(now, self._free_at) + len(piece) / self._bytes_per_s
                await asyncio.sleep(self._free_at - now)
            await asyncio.wait_for(self._loop.sock_sendall(sock, piece), _STALL_S)
            self.sent_bytes += len(piece)


def _check(ranges: np.ndarray, table: RelayTable) -> None:
    shard, begin, end = ranges
    count = len(table.shards)
    if not 0 < len(shard) <= MOST_RANGES or shard.min() < 0 or shard.max() >= count:
        raise WireError(f"a request names {len(shard)} ranges of {count} shards")
    sizes = np.array([table.shards[i].nbytes for i in shard.tolist()], np.int64)
    if (begin < 0).any() or (begin > end).any() or (end > sizes).any():
        raise WireError("a request names bytes outside of a shard")
    if int((end - begin).sum()) > MOST_FETCH_BYTES:
        raise WireError(f"a request names more than {MOST_FETCH_BYTES} bytes")
