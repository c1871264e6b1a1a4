"""One dock node behind a socket: a thread that reads frames, lets `DockNode` answer, and writes the answers.

One selector loop, no lock: verbs run one after the other, none of them waits. A parked call costs nothing until the
verb that satisfies it sends its answer. A connection that sends a malformed frame is closed and nobody else notices.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.columns import ColumnSpec, Schema, TaskSpec
from mindspeed_asyncflow.dock.node import DockNode
from mindspeed_asyncflow.dock.warehouse import Arena
from mindspeed_asyncflow.dock.wire import HEADER, Header, Message, Verb, WireError
from mindspeed_asyncflow.errors import AsyncFlowError, PlatformError

_GREETING_BYTES = 4096  # most that a connection may send before it has shown the secret
_REMEMBERED = 512  # answers kept for callers that repeat a call after a broken connection
_NOT_REMEMBERED = (Verb.READ, Verb.STATS, Verb.RESERVE)
_LONGEST_SLEEP_S = 60.0
_CHUNK = 1 << 18


class _Connection:
    """Buffers of one client."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.challenge = secrets.token_bytes(wire.CHALLENGE_BYTES)
        self.trusted = False
        self.header: Header | None = None
        self.buffer = bytearray(HEADER.size)
        self.filled = 0
        self.outgoing: deque[memoryview] = deque()
        self.parked: set[object] = set()

    def expect(self, nbytes: int) -> None:
        self.buffer, self.filled = bytearray(nbytes), 0


class DockServer:
    """Serves one controller/warehouse pair from a thread of this process.

    `port` 0 takes any free one; a busy port raises PlatformError. Every client must know `secret`. `close()` ends the
    thread and removes the arena; clients that wait then get an error at once.
    """

    def __init__(
        self, columns: Sequence[ColumnSpec], tasks: Sequence[TaskSpec], arena_mb: int = 64, lease_s: float = 120.0,
        host: str = "127.0.0.1", port: int = 0, secret: str | bytes = b"", arena_path: str | None = None,
    ) -> None:  # fmt: skip
        self._secret = secret.encode() if isinstance(secret, str) else secret
        schema = Schema(columns, tasks)
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise PlatformError(
                f"the dock cannot listen on {host}:{port} ({error.strerror}); set dock.port to a free one, or to 0"
            ) from error
        try:
            self._arena = Arena.create(arena_path, arena_mb << 20)
        except PlatformError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._node = DockNode(schema, self._arena, lease_s)
        self._hello = _hello(schema, self._arena)
        self._most_bytes = len(self._arena.bytes) + wire.MAX_JSON
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._callers: dict[object, tuple[_Connection, Header]] = {}  # of parked calls
        self._answers: OrderedDict[tuple[int, int], list[memoryview]] = OrderedDict()
        self._wake_receive, self._wake_send = socket.socketpair()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="dock-server", daemon=True)
        self.bad_frames = 0
        self.failure: BaseException | None = None  # what ended the thread, if anything did

    @property
    def address(self) -> str:
        """host:port"""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    @property
    def arena_path(self) -> str:
        return self._arena.path

    def start(self) -> DockServer:
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread, closes all connections, removes the arena file. May be called twice."""
        self._stop = True
        with contextlib.suppress(OSError):
            self._wake_send.send(b"x")
        if self._thread.is_alive():
            self._thread.join(10.0)
        for sock in (self._listener, self._wake_send, self._wake_receive):
            sock.close()
        self._arena.unlink()

    def __enter__(self) -> DockServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the loop --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receive, selectors.EVENT_READ)
        try:
            while not self._stop:
                self._turn()
        except BaseException as error:
            self.failure = error
            raise
        finally:  # whatever happened, nobody must wait for an answer that cannot come
            for connection in list(self._connections):
                self._close(connection)
            self._selector.close()

    def _turn(self) -> None:
        deadline = self._node.next_deadline()
        wait = None if deadline is None else min(max(0.0, deadline - time.monotonic()), _LONGEST_SLEEP_S)
        for key, events in self._selector.select(wait):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Connection):
                self._serve(key.data, events)
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            self._node.tick(now)
        self._send_outcomes()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the client has gone again
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        try:
            self._send(connection, [memoryview(connection.challenge)])
        except OSError:
            self._close(connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                self._receive(connection)
        except WireError:
            self.bad_frames += 1
            self._close(connection)
        except OSError:  # reset by the client
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        for key in connection.parked:
            self._node.cancel(key)
            self._callers.pop(key, None)
        self._node.connection_lost(connection, time.monotonic())

    # -- frames in and out -----------------------------------------------------------------------------------------

    def _receive(self, connection: _Connection) -> None:
        """Takes what is there; every complete frame is answered."""
        while connection in self._connections:
            view = memoryview(connection.buffer)[connection.filled : connection.filled + _CHUNK]
            if len(view):
                try:
                    count = connection.socket.recv_into(view)
                except BlockingIOError:
                    return
                if count == 0:
                    self._close(connection)
                    return
                connection.filled += count
            if connection.filled < len(connection.buffer):
                continue
            if connection.header is None:
                limit = self._most_bytes if connection.trusted else _GREETING_BYTES
                connection.header = wire.decode_header(connection.buffer, limit)
                connection.expect(connection.header.body_bytes)
                continue
            header, body = connection.header, memoryview(connection.buffer)
            connection.header = None
            connection.expect(HEADER.size)
            self._dispatch(connection, header, wire.decode_body(header, body))
            return  # one call per turn and connection: nobody is delayed by a busy neighbour

    def _dispatch(self, connection: _Connection, header: Header, message: Message) -> None:
        if not connection.trusted:
            self._greet(connection, header, message)
            return
        try:
            verb = Verb(header.verb)
        except ValueError:
            raise WireError(f"unknown verb {header.verb}") from None
        if verb is Verb.HELLO:
            raise WireError("a second greeting")
        repeated = self._answers.get((header.client, header.request)) if verb not in _NOT_REMEMBERED else None
        if repeated is not None:
            if isinstance(message.get("offset"), int):
                self._node.cancel_extent(message["offset"])
            self._send(connection, repeated)
            return
        key = (connection, header.request)
        try:
            reply = self._node.handle(verb, message, connection, key, time.monotonic())
        except WireError:
            raise
        except AsyncFlowError as error:
            self._answer(connection, header, error)
        else:
            if reply is None:
                connection.parked.add(key)
                self._callers[key] = (connection, header)
            else:
                self._answer(connection, header, reply)

    def _greet(self, connection: _Connection, header: Header, message: Message) -> None:
        shown = message.array("answer", "uint8") if header.verb == Verb.HELLO else np.empty(0, np.uint8)
        if not wire.knows_secret(self._secret, connection.challenge, shown):
            raise WireError("wrong secret")
        connection.trusted = True
        self._send(connection, _frame(header, 0, self._hello))

    def _answer(self, connection: _Connection, header: Header, reply: dict | AsyncFlowError) -> None:
        if isinstance(reply, AsyncFlowError):
            frame = _frame(header, 1, {"error": type(reply).__name__, "text": str(reply)})
        else:
            frame = _frame(header, 0, reply)
            if header.verb not in _NOT_REMEMBERED:
                self._answers[(header.client, header.request)] = frame
                if len(self._answers) > _REMEMBERED:
                    self._answers.popitem(last=False)
        self._send(connection, frame)

    def _send_outcomes(self) -> None:
        while outcomes := self._node.take_outcomes():
            for key, reply in outcomes:
                connection, header = self._callers.pop(key, (None, None))
                if connection is None or header is None:  # its connection was lost in this very turn
                    continue
                connection.parked.discard(key)
                try:
                    self._answer(connection, header, reply)
                except OSError:
                    self._close(connection)

    def _send(self, connection: _Connection, frame: Sequence[memoryview]) -> None:
        connection.outgoing.extend(frame)
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        outgoing = connection.outgoing
        while outgoing:
            try:
                sent = connection.socket.sendmsg([outgoing[i] for i in range(min(len(outgoing), 64))])
            except BlockingIOError:
                break
            while sent:
                if sent >= len(outgoing[0]):
                    sent -= len(outgoing.popleft())
                else:
                    outgoing[0] = outgoing[0][sent:]
                    sent = 0
            while outgoing and not len(outgoing[0]):
                outgoing.popleft()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)


def _frame(header: Header, status: int, message: dict) -> list[memoryview]:
    """An answer as one buffer: copied, because views into the arena may change before they have left."""
    parts = wire.encode(header.verb, status, header.client, header.request, message)
    return [memoryview(b"".join(parts))]


def _hello(schema: Schema, arena: Arena) -> dict:
    return {
        "columns": [[c.name, c.dtype, c.kind, c.shared, c.tokens] for c in schema.columns.values()],
        "tasks": [[t.name, list(t.columns)] for t in schema.tasks.values()],
        "arena_path": arena.path,
        "arena_bytes": len(arena.bytes),
        "arena_token": np.frombuffer(arena.token, np.uint8),
    }
