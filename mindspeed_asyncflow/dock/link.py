"""One pair's connection to another pair: non-blocking, opened again when it breaks, many calls under way at once."""

from __future__ import annotations

import contextlib
import errno
import itertools
import secrets
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.channel import error_of
from mindspeed_asyncflow.dock.wire import HEADER, Message, Verb, WireError
from mindspeed_asyncflow.errors import AsyncFlowError, WorkerLost

Reply = Message | AsyncFlowError


class Watcher(Protocol):
    """The loop that looks after sockets."""

    def watch_link(self, link: Link, writing: bool) -> None:
        """From now on, call `serve` when `link.fd` can be read, or (`writing`) written."""

    def unwatch_link(self, link: Link) -> None: ...


Then = Callable[[Reply], None]

AGAIN_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # pauses between attempts to connect; the last one repeats
_CHUNK = 1 << 16
_OPTIONS = (  # a node that vanished without a word is noticed within about ten seconds
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),  # ms
)


class Link:
    """`changed(link)` is called when the link has come up or gone down, outside of any call on it."""

    def __init__(
        self, number: int, address: str, secret: bytes, watcher: Watcher, changed: Callable[[Link], None],
    ) -> None:  # fmt: skip
        self.number, self.address = number, address
        self.up = False
        self._secret, self._watcher, self._changed = secret, watcher, changed
        self._socket: socket.socket | None = None
        self._writing = False
        self.fd = -1
        self._client = secrets.randbits(63)
        self._requests = itertools.count(1)
        self._waiting: dict[int, Then] = {}
        self._inbox = bytearray()
        self._outbox: deque[bytes] = deque()
        self._greeted = False
        self._attempts = 0
        self._frames = 0
        self.next_attempt = 0.0  # s, clock of the server

    @property
    def down(self) -> bool:
        """No connection, and none being made."""
        return self._socket is None

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, verb: Verb, message: Mapping[str, Any], then: Then | None = None) -> int:
        """Sends a call; `then` gets its answer, or WorkerLost. Returns the request number. The link must be up."""
        request = next(self._requests)
        if then is not None:
            self._waiting[request] = then
        self._send(wire.frame(verb, 0, self._client, request, message))
        return request

    # -- the connection --------------------------------------------------------------------------------------------

    def attempt(self, now: float) -> None:
        """Starts to connect, if there is no connection and it is time."""
        if self._socket is not None or now < self.next_attempt:
            return
        self.next_attempt = now + AGAIN_S[min(self._attempts, len(AGAIN_S) - 1)]
        self._attempts += 1
        host, _, port = self.address.rpartition(":")
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        for level, option, value in _OPTIONS:
            sock.setsockopt(level, option, value)
        try:
            code = sock.connect_ex((host.strip("[]"), int(port)))
        except OSError:
            code = errno.EADDRNOTAVAIL
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            return
        self._socket, self.fd = sock, sock.fileno()
        self._writing = True
        self._watcher.watch_link(self, True)

    def serve(self) -> int:
        """The loop says that something can be read or written. Returns the number of frames that came."""
        before = self._frames
        try:
            self._receive()
            if self._socket is not None:
                self._flush()
        except (OSError, WireError):
            self.close()
        return self._frames - before

    def close(self) -> None:
        """Ends the connection; calls under way get WorkerLost."""
        if self._socket is None:
            return
        self._watcher.unwatch_link(self)
        self._socket.close()
        self._socket, self._inbox, self._greeted = None, bytearray(), False
        self._outbox.clear()
        waiting, self._waiting = self._waiting, {}
        was_up, self.up = self.up, False
        for then in waiting.values():
            then(WorkerLost(f"pair {self.number} of the dock at {self.address} went away"))
        if was_up:
            self._changed(self)

    def _receive(self) -> None:
        assert self._socket is not None
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            if not data:
                self.close()
                return
            self._inbox += data
            if len(data) < _CHUNK:
                break
        if not self._greeted:
            if len(self._inbox) < wire.CHALLENGE_BYTES:
                return
            challenge = bytes(self._inbox[: wire.CHALLENGE_BYTES])
            del self._inbox[: wire.CHALLENGE_BYTES]
            self._greeted = True
            self.call(Verb.HELLO, {"answer": wire.answer(self._secret, challenge)}, self._hello)
        while self._socket is not None and self._next_frame():
            pass

    def _next_frame(self) -> bool:
        if len(self._inbox) < HEADER.size:
            return False
        header = wire.decode_header(self._inbox, wire.MAX_BODY)
        end = HEADER.size + header.body_bytes
        if len(self._inbox) < end:
            return False
        body = bytes(memoryview(self._inbox)[HEADER.size : end])
        del self._inbox[:end]
        self._frames += 1
        then = self._waiting.pop(header.request, None)
        if then is not None:
            reply = wire.decode_body(header, memoryview(body))
            then(error_of(reply) if header.status else reply)
        return True

    def _hello(self, reply: Reply) -> None:
        if isinstance(reply, AsyncFlowError):
            return
        self.up, self._attempts = True, 0
        self._changed(self)

    def _send(self, frame: bytes) -> None:
        self._outbox.append(frame)
        if self._socket is not None and self._greeted:
            with contextlib.suppress(OSError):  # the other pair has just died: `serve` hears of that and closes
                self._flush()

    def _flush(self) -> None:
        assert self._socket is not None
        while self._outbox:
            try:
                sent = self._socket.send(self._outbox[0])
            except BlockingIOError:
                break
            if sent < len(self._outbox[0]):
                self._outbox[0] = self._outbox[0][sent:]
                break
            self._outbox.popleft()
        if bool(self._outbox) != self._writing:
            self._writing = bool(self._outbox)
            self._watcher.watch_link(self, self._writing)
