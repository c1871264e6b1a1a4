"""One client's connection as the server sees it: frames out of what arrives, answers out piece by piece.

Nothing here waits, and nothing takes more of a turn than a bounded number of bytes: a large bulk is received into the
arena, and sent from it, in steps between which everybody else is served.
"""

from __future__ import annotations

import secrets
import socket
from collections import deque
from typing import NamedTuple

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.node import Answer
from mindspeed_asyncflow.dock.store import Outgoing
from mindspeed_asyncflow.dock.wire import HEADER, Header, Message

GREETING_BYTES = 4096  # most that a connection may send before it has shown the secret
_READ = 1 << 16
_STEP = 1 << 18  # bytes of bulk that are moved for one connection in one turn
_GROW = 1 << 20  # a large body gets memory as it arrives, not when it is announced
_MOST_VECTORS = 1024


class Call(NamedTuple):
    header: Header
    message: Message
    landed: bool = False  # its bulk has arrived


class _Stream:
    """Stretches of the arena on their way out, and whose rows they are."""

    def __init__(self, outgoing: Outgoing, memory: memoryview, answer: Answer) -> None:
        self.answer, self._memory = answer, memory
        self.left = outgoing.nbytes
        self._chunks = deque(outgoing.chunks)
        self._at = 0  # stretch of the first chunk
        self._inside = 0  # bytes of the first stretch that have left

    def vectors(self, most: int) -> list[memoryview | bytes]:
        """The next buffers, at most `most` bytes."""
        out: list[memoryview | bytes] = []
        at, inside = self._at, self._inside
        for chunk in self._chunks:
            if isinstance(chunk, bytes):
                out.append(memoryview(chunk)[inside : inside + most])
                most -= len(out[-1])
            else:
                for i in range(at, len(chunk[0])):
                    begin = chunk[0][i] + inside
                    out.append(self._memory[begin : min(chunk[1][i], begin + most)])
                    most -= len(out[-1])
                    inside = 0
                    if most <= 0 or len(out) >= _MOST_VECTORS:
                        return out
            at, inside = 0, 0
            if most <= 0 or len(out) >= _MOST_VECTORS:
                break
        return out

    def sent(self, count: int) -> None:
        self.left -= count
        count += self._inside
        while self._chunks:
            chunk = self._chunks[0]
            if isinstance(chunk, bytes):
                if count < len(chunk):
                    break
                count -= len(chunk)
            else:
                begins, ends = chunk
                while self._at < len(begins) and count >= ends[self._at] - begins[self._at]:
                    count -= ends[self._at] - begins[self._at]
                    self._at += 1
                if self._at < len(begins):
                    break
                self._at = 0
            self._chunks.popleft()
        self._inside = count


class Connection:
    """Buffers of one client. `stalled_since`: when its answers last moved, while any are waiting to leave."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.fd = sock.fileno()
        self.challenge = secrets.token_bytes(wire.CHALLENGE_BYTES)
        self.trusted = False
        self.parked: set[object] = set()
        self.events = 0  # what the loop watches it for
        self.stalled_since = 0.0
        self._in = b""  # arrived and not yet looked at
        self._header: Header | None = None
        self._body = bytearray()  # of a frame that did not arrive at once
        self._filled = 0
        self._landing: deque[memoryview] = deque()  # where the rest of a bulk goes
        self._call: Call | None = None  # the call whose bulk is arriving
        self._out: deque[bytes | memoryview | _Stream] = deque()

    # -- in --------------------------------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Takes what has arrived, within one step. False: the client has closed the connection."""
        try:
            if self._landing:
                count = self.socket.recv_into(self._landing[0], min(len(self._landing[0]), _STEP))
                self._landed(count)
                return count > 0
            if self._header is not None and self._in == b"":
                return self._receive_body(self._header)
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return True
        self._in = self._in + data if self._in else data
        return len(data) > 0

    def _receive_body(self, header: Header) -> bool:
        if self._filled == len(self._body):
            self._body += bytes(min(header.body_bytes - self._filled, max(_GROW, self._filled)))
        count = self.socket.recv_into(memoryview(self._body)[self._filled :])
        self._filled += count
        return count > 0

    def next_call(self, most_bytes: int, most_bulk: int) -> Call | None:
        """The next frame that is complete but for its bulk; see `land`. Raises WireError for what is no frame."""
        if self._call is not None:
            if self._landing:
                return None
            call, self._call = self._call, None
            return call
        if self._header is None:
            if len(self._in) < HEADER.size:
                return None
            limit = most_bytes if self.trusted else GREETING_BYTES
            self._header = wire.decode_header(self._in, limit, most_bulk if self.trusted else 0)
            end = HEADER.size + self._header.body_bytes
            if len(self._in) >= end:
                call = Call(self._header, wire.decode_body(self._header, memoryview(self._in)[HEADER.size : end]))
                self._header, self._in = None, self._in[end:]
                return call
            self._body, self._in = bytearray(self._in[HEADER.size :]), b""
            self._filled = len(self._body)
        header = self._header
        if self._filled < header.body_bytes:
            return None
        self._header, body = None, self._body
        self._body, self._filled = bytearray(), 0
        return Call(header, wire.decode_body(header, memoryview(body)))

    def land(self, call: Call, views: list[memoryview]) -> None:
        """The bulk of `call` goes to `views`; `next_call` gives the call again when it has arrived."""
        self._call = call._replace(landed=True)
        self._landing = deque(views)
        while self._in and self._landing:
            view = self._landing[0]
            count = min(len(view), len(self._in))
            view[:count] = self._in[:count]
            self._in = self._in[count:]
            self._landed(count)

    def _landed(self, count: int) -> None:
        view = self._landing.popleft()
        if count < len(view):
            self._landing.appendleft(view[count:])

    @property
    def landing(self) -> bool:
        """Whether bulk is still to come."""
        return bool(self._landing)

    @property
    def has_more(self) -> bool:
        """Whether a whole header has arrived that nobody has looked at."""
        return len(self._in) >= HEADER.size and self._header is None and not self._landing

    # -- out -------------------------------------------------------------------------------------------------------

    @property
    def sending(self) -> bool:
        return bool(self._out)

    def send(self, frame: bytes) -> None:
        """Sends as much as goes at once; the rest waits for `flush`."""
        if not self._out:
            try:
                sent = self.socket.send(frame)
            except BlockingIOError:
                sent = 0
            if sent == len(frame):
                return
            self._out.append(memoryview(frame)[sent:])
        else:
            self._out.append(frame)

    def send_values(self, frame: bytes, answer: Answer, memory: memoryview) -> None:
        assert answer.stream is not None
        self._out.append(frame)
        self._out.append(_Stream(answer.stream, memory, answer))

    def flush(self) -> list[Answer]:
        """Sends one step; returns the answers that have left wholly."""
        gone: list[Answer] = []
        vectors: list[bytes | memoryview] = []
        size = 0
        for entry in self._out:
            if isinstance(entry, _Stream):
                vectors += entry.vectors(_STEP - size)
            else:
                vectors.append(entry)
            size = sum(map(len, vectors))
            if size >= _STEP or len(vectors) >= _MOST_VECTORS // 2:
                break
        try:
            if len(vectors) == 1:
                sent = self.socket.send(vectors[0])
            else:
                sent = self.socket.sendmsg(vectors[:_MOST_VECTORS])
        except BlockingIOError:
            return gone
        self.stalled_since = 0.0
        while self._out:
            entry = self._out[0]
            left = entry.left if isinstance(entry, _Stream) else len(entry)
            count = min(sent, left)
            sent -= count
            if isinstance(entry, _Stream):
                entry.sent(count)
                if count == left:
                    gone.append(entry.answer)
            elif count < left:
                self._out[0] = memoryview(entry)[count:]
            if count < left:
                break
            self._out.popleft()
        return gone

    def abandon(self) -> list[Answer]:
        """Closes the socket; returns the answers that were on their way."""
        self.socket.close()
        left = [entry.answer for entry in self._out if isinstance(entry, _Stream)]
        self._out.clear()
        self._landing.clear()
        return left
