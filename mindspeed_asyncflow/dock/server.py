"""One dock node behind a socket: a thread that reads frames, lets `DockNode` answer, and writes the answers.

One loop over epoll, no lock: verbs run one after the other, none of them waits, and bulk moves in short steps between
them. A parked call costs nothing until the verb that satisfies it sends its answer. A connection that sends a malformed
frame is closed and nobody else notices; one that does not take its answers is not listened to, and closed in the end.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from mindspeed_asyncflow.dock import arguments, wire
from mindspeed_asyncflow.dock.arena import Arena
from mindspeed_asyncflow.dock.columns import ColumnSpec, Schema, TaskSpec
from mindspeed_asyncflow.dock.connection import Call, Connection
from mindspeed_asyncflow.dock.greeting import hello, local_name
from mindspeed_asyncflow.dock.link import Link
from mindspeed_asyncflow.dock.member import Member, Outcome
from mindspeed_asyncflow.dock.memory import can_restart, damage_named
from mindspeed_asyncflow.dock.node import MOST_ROWS, Answer
from mindspeed_asyncflow.dock.wire import MAX_BODY, Header, Verb, WireError
from mindspeed_asyncflow.errors import DockError, DockMemoryLost, PlatformError

_WITH_BULK = (Verb.PUT, Verb.WRITE)
_MOST_PARKED = 256  # calls of one connection
_LONGEST_SLEEP_S = 60.0
_STALL_S = 30.0  # how long a client may leave its answers lying
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT


class DockServer:
    """Serves one controller/warehouse pair, number `pair`, from a thread of this process.

    `port` 0 takes any free one; a busy port raises PlatformError. Every client must know `secret`. `max_rows` bounds
    the rows held at a time (0: only bytes count). `restart=True` goes on from the arena and journal at `arena_path`
    that a killed server has left; its clients go on too when it listens at the same address. `close()` ends the thread
    and removes the arena; clients that wait then get an error at once. `failed` is told what else ended the thread.
    Where arena or journal are gone or damaged a restart raises `DockMemoryLost`; clients also go on with an empty pair
    whose `life`, from 0, is one more: rows, claims and handles of the one before are stale for it.
    """

    def __init__(
        self, columns: Sequence[ColumnSpec], tasks: Sequence[TaskSpec], arena_mb: int = 64, lease_s: float = 120.0,
        host: str = "127.0.0.1", port: int = 0, secret: str | bytes = b"", arena_path: str | None = None,
        pair: int = 0, max_rows: int = 0, stall_s: float = _STALL_S, restart: bool = False,
        failed: Callable[[BaseException], None] | None = None, life: int = 0,
    ) -> None:  # fmt: skip
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._stall_s, self._failed = stall_s, failed
        arguments.server(lease_s, max_rows, pair, host, self._secret, life)
        try:
            self._listener = socket.create_server((host, port), backlog=512)
        except OSError as error:
            raise PlatformError(
                f"the dock cannot listen on {host}:{port} ({error.strerror}); set dock.port to a free one, or to 0"
            ) from error
        self._listener.setblocking(False)
        self._local_listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # for clients of this node
        self._poll = select.epoll()
        self._links: dict[int, Link] = {}
        try:
            self._arena = self._open_arena(arena_path, arena_mb << 20, restart)
            self._hold_arena()
            with damage_named(self._arena.path) if restart else contextlib.nullcontext():
                how = (lease_s, pair, max_rows, self._secret, self, time.monotonic(), restart, life)
                self._member = Member(Schema(columns, tasks), self._arena, *how)
        except BaseException:  # boundary: what was opened is closed, and the error goes on
            self._listener.close()
            self._local_listener.close()
            self._poll.close()
            raise
        self._local_listener.listen(512)
        self._local_listener.setblocking(False)
        self._connections: dict[int, Connection] = {}
        self._busy: dict[Connection, None] = {}  # whose next frame has arrived already
        self._sending: dict[Connection, None] = {}  # whose answers did not leave at once
        self._callers: dict[object, tuple[Connection, Header]] = {}  # of parked calls
        self._waiting: dict[tuple[int, int], Connection] = {}  # where a call is parked, by its identity
        self._wake_receive, self._wake_send = socket.socketpair()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="dock-server", daemon=True)
        self.bad_frames = 0
        self.failure: BaseException | None = None  # what ended the thread, if anything did

    def _hold_arena(self) -> None:
        """The name of the node's socket is also the lock of the arena: it goes with the process that holds it."""
        try:
            self._local_listener.bind(f"\0{local_name(self._arena)}")
        except OSError as error:
            raise PlatformError(
                f"the arena {self._arena.path} is in use by a pair that runs; end that one before restart=True"
            ) from error

    @staticmethod
    def _open_arena(path: str | None, nbytes: int, restart: bool) -> Arena:
        if not restart:
            return Arena.create(path, nbytes)
        if path is None or not can_restart(path):
            raise DockMemoryLost(f"there is no arena with a journal at {path}: a pair cannot go on from it")
        with damage_named(path):
            return Arena.reopen(path)

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
        for sock in (self._listener, self._local_listener, self._wake_send, self._wake_receive):
            sock.close()
        self._member.close()
        self._arena.unlink()

    def __enter__(self) -> DockServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the loop --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._listeners = {sock.fileno(): sock for sock in (self._listener, self._local_listener)}
        for fd in self._listeners:
            self._poll.register(fd, _IN)
        self._poll.register(self._wake_receive.fileno(), _IN)
        try:
            while not self._stop:
                self._turn()
        except BaseException as error:  # boundary: the thread ends, and says why in `failure`
            self.failure = error
            if self._failed is not None:
                self._failed(error)
            raise
        finally:  # whatever happened, nobody must wait for an answer that cannot come
            for connection in list(self._connections.values()):
                self._close(connection)
            self._member.peers.close()
            self._poll.close()

    def _turn(self) -> None:
        deadline = self._next_deadline()
        wait = _LONGEST_SLEEP_S if deadline is None else min(max(0.0, deadline - time.monotonic()), _LONGEST_SLEEP_S)
        busy = list(self._busy)
        for fd, events in self._poll.poll(0 if busy else wait):
            connection = self._connections.get(fd)
            if connection is not None:
                if connection not in self._busy:
                    self._serve(connection, events)
            elif fd in self._listeners:
                self._accept(self._listeners[fd])
            elif fd in self._links:
                self._member.serve_link(self._links[fd], time.monotonic())
        for connection in busy:
            if connection in self._busy:
                self._serve(connection, 0)
        if deadline is not None:
            now = time.monotonic()
            if deadline <= now:
                self._member.tick(now)
                self._drop_stalled(now)
        self._member.settle(time.monotonic())
        self._send_outcomes()

    def _next_deadline(self) -> float | None:
        deadline = self._member.next_deadline()
        if not self._sending:
            return deadline
        stalled = min(c.stalled_since for c in self._sending) + self._stall_s
        return stalled if deadline is None else min(deadline, stalled)

    def _drop_stalled(self, now: float) -> None:
        for connection in [c for c in self._sending if c.stalled_since + self._stall_s <= now]:
            self._close(connection)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # the client has gone again
            return
        sock.setblocking(False)
        if listener is self._listener:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock)
        connection.events = _IN
        self._connections[connection.fd] = connection
        self._poll.register(connection.fd, _IN)
        self._send(connection, connection.challenge)

    def _serve(self, connection: Connection, events: int) -> None:
        """One step for a connection: its answers move on, and one of its calls is answered."""
        try:
            if events & ~_IN and connection.sending:
                self._flush(connection)
            if events & ~_OUT and not connection.has_more and not connection.receive():
                self._close(connection)
                return
            if connection.sending:  # does not take its answers: not listened to
                self._busy.pop(connection, None)
                return
            self._dispatch_next(connection)
            self._watch(connection)
        except WireError:
            self.bad_frames += 1
            self._close(connection)
        except OSError:  # reset by the client
            self._close(connection)

    def _watch(self, connection: Connection) -> None:
        """Notes what the loop has to look for on this connection."""
        if self._connections.get(connection.fd) is not connection:
            return
        if connection.sending:
            events = _OUT
            if connection not in self._sending or not connection.stalled_since:
                connection.stalled_since = time.monotonic()
            self._sending[connection] = None
            self._busy.pop(connection, None)
        else:
            events = _IN
            if self._sending:
                self._sending.pop(connection, None)
            if connection.has_more:
                self._busy[connection] = None
            elif self._busy:
                self._busy.pop(connection, None)
        if events != connection.events:
            connection.events = events
            self._poll.modify(connection.fd, events)

    def _close(self, connection: Connection) -> None:
        if self._connections.get(connection.fd) is not connection:  # closed, and its number may be another's now
            return
        del self._connections[connection.fd]
        self._poll.unregister(connection.fd)
        self._busy.pop(connection, None)
        self._sending.pop(connection, None)
        now = time.monotonic()
        for key in connection.parked:
            self._member.cancel(key)
            _, header = self._callers.pop(key, (None, None))
            if header is not None:
                self._waiting.pop((header.client, header.request), None)
        for answer in connection.abandon():
            self._member.unpin(answer, now)
        self._member.connection_lost(connection, now)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _dispatch_next(self, connection: Connection) -> None:
        call = connection.next_call(MAX_BODY, wire.MAX_BULK)
        if call is not None:
            self._dispatch(connection, call)

    def _dispatch(self, connection: Connection, call: Call) -> None:
        header, message, landed = call
        if not connection.trusted:
            self._greet(connection, call)
            return
        try:
            verb = Verb(header.verb)
        except ValueError:
            raise WireError(f"unknown verb {header.verb}") from None
        if verb is Verb.HELLO:
            raise WireError("a second greeting")
        if header.bulk_bytes and not landed:
            if verb not in _WITH_BULK:
                raise WireError(f"{verb.name} carries no bulk")
            views = self._member.node.store.landing(connection, message.whole("reservation"), header.bulk_bytes)
            connection.land(call, views)
            self._dispatch_next(connection)
            return
        identity = (header.client, header.request)
        repeated = self._member.answers.get(identity)
        if repeated is not None:
            if isinstance(message.get("reservation"), int):
                self._member.node.store.cancel_of(connection, message["reservation"])
            self._send(connection, repeated)
            return
        if identity in self._waiting:  # asked again before the loss of the first connection was noticed
            self._close(self._waiting[identity])
        key = (connection, header.request)
        outcome: Outcome | None
        try:
            outcome = self._member.handle(
                verb, message, connection, key, header.client, header.request, time.monotonic()
            )
        except WireError as error:  # the frame is whole, a value in it is not what it should be
            outcome = DockError(str(error))
        self._send_outcomes()  # those who wait for these rows come before the one who brought them
        if outcome is not None:
            self._answer(connection, header, outcome)
        else:
            self._park(connection, key, header, most=MOST_ROWS if message.get("forwarded") is True else _MOST_PARKED)

    def _park(self, connection: Connection, key: object, header: Header, most: int) -> None:
        if len(connection.parked) >= most:
            raise WireError(f"more than {most} calls of one connection wait")
        connection.parked.add(key)
        self._callers[key] = (connection, header)
        self._waiting[(header.client, header.request)] = connection

    def _greet(self, connection: Connection, call: Call) -> None:
        header, message, _ = call
        shown = message.array("answer", "uint8") if header.verb == Verb.HELLO else np.empty(0, np.uint8)
        if not wire.knows_secret(self._secret, connection.challenge, shown):
            raise WireError("wrong secret")
        connection.trusted = True
        told = hello(self._member, self._arena)
        self._send(connection, wire.frame(header.verb, 0, header.client, header.request, told))

    def _answer(self, connection: Connection, header: Header, outcome: Outcome) -> None:
        if isinstance(outcome, bytes):
            self._send(connection, outcome)
            return
        verb, client, request = header.verb, header.client, header.request
        if isinstance(outcome, Answer):
            bulk = outcome.stream.nbytes if outcome.stream is not None else 0
            try:
                whole = wire.frame(verb, 0, client, request, outcome.body | outcome.extra, bulk)
            except WireError as large:
                outcome = DockError(str(large))
            else:
                if bulk:
                    self._member.node.pin(outcome)
                    connection.send_values(whole, outcome, self._arena.memory)
                    self._flush(connection)
                else:
                    self._send(connection, whole)
                return
        error = {"error": type(outcome).__name__, "text": str(outcome)}
        self._send(connection, wire.frame(verb, 1, client, request, error))

    def _send_outcomes(self) -> None:
        while outcomes := self._member.take_outcomes():
            for key, reply in outcomes:
                connection, header = self._callers.pop(key, (None, None))
                if connection is None or header is None:  # its connection was lost in this very turn
                    continue
                connection.parked.discard(key)
                self._waiting.pop((header.client, header.request), None)
                self._answer(connection, header, reply)

    # -- links to other pairs, see `Watcher` -------------------------------------------------------------------------

    def watch_link(self, link: Link, writing: bool) -> None:
        events = _IN | _OUT if writing else _IN
        if link.fd in self._links:
            self._poll.modify(link.fd, events)
        else:
            self._links[link.fd] = link
            self._poll.register(link.fd, events)

    def unwatch_link(self, link: Link) -> None:
        del self._links[link.fd]
        self._poll.unregister(link.fd)

    # -- frames out ------------------------------------------------------------------------------------------------

    def _send(self, connection: Connection, frame: bytes) -> None:
        """Sends an answer, now if it can; a client that is gone is closed."""
        try:
            connection.send(frame)
        except OSError:
            self._close(connection)
            return
        if connection.sending:
            self._watch(connection)

    def _flush(self, connection: Connection) -> None:
        """Sends what can be sent in one step; a client that is gone is closed."""
        try:
            for answer in connection.flush():
                self._member.unpin(answer, time.monotonic())
        except OSError:
            self._close(connection)
            return
        self._watch(connection)
