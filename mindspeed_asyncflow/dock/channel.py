"""One connection from a client to a dock server: one call at a time, one frame there and one back."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow import errors
from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.pool import BufferPool
from mindspeed_asyncflow.dock.wire import HEADER, Message, Verb, WireError
from mindspeed_asyncflow.errors import AsyncFlowError, DockError, Unanswered

_GREETING_S = 2.0  # a server that runs greets at once
_GRACE_S = 2.0  # beyond the deadline that the server keeps by itself
_SMALL = 1 << 17  # frames up to this size are joined before they are sent
_READ = 1 << 16
_MOST_VECTORS = 1024
_TIMEVAL = struct.Struct("ll")


NO_STRETCH = (0, 0, 0)


class Broken(Exception):
    """The connection ended before the answer came."""


class Channel:
    """Blocking socket with the kernel's timeouts: a call costs one send and, when the answer is small, one receive."""

    def __init__(
        self, address: str, secret: bytes, client: int, wait_s: float, pool: BufferPool, local: str = ""
    ) -> None:  # fmt: skip
        """`local`: name of the server's socket on this node, which is tried first."""
        self.address, self._client, self._wait_s, self._pool = address, client, wait_s, pool
        self.usable = False
        self.ahead = NO_STRETCH  # number, byte offset and size of what the server keeps for the next call from here
        self._patience = 0.0
        greeting_s = min(wait_s, _GREETING_S)
        self._socket = _connect_here(local) or _connect(address, greeting_s)
        try:
            self._wait_at_most(greeting_s)
            challenge = self._exactly(wire.CHALLENGE_BYTES)
            self.hello = self.call(Verb.HELLO, 0, {"answer": wire.answer(secret, challenge)})
        except BlockingIOError:
            self._socket.close()
            raise Broken(f"it accepts the connection and says nothing for {greeting_s:g} s") from None
        except BaseException as error:  # boundary: a socket that was opened is closed, whatever went wrong
            self._socket.close()
            if isinstance(error, OSError):
                raise Broken(str(error)) from error
            raise

    def call(
        self, verb: Verb, request: int, message: Mapping[str, Any], bulk: Sequence[np.ndarray] = ()
    ) -> Message:  # fmt: skip
        """The answer; its `bulk` is the uint8 array of the bytes that follow it, if any do.

        Raises what the server answered if that is an error, Broken, or DeadlineExceeded. `usable` is False afterwards
        when the connection is in the middle of something and can carry no other call.
        """
        self.usable = False
        timeout_s = message.get("timeout_s")
        patience = self._wait_s if timeout_s is None else float(timeout_s) + _GRACE_S
        if verb is not Verb.CLAIM:  # a claim may be asked anew; what else gets no answer may have been carried out
            patience = max(patience, self._wait_s)
        try:
            self._wait_at_most(patience)
            nbytes = sum(array.nbytes for array in bulk) if bulk else 0
            self._send(wire.encode(verb, 0, self._client, request, message, nbytes), bulk)
            reply, status = self._receive()
        except (TimeoutError, BlockingIOError):
            raise Unanswered(
                f"the dock server at {self.address} did not answer {verb.name} within {patience:g} s"
            ) from None
        except OSError as error:
            raise Broken(str(error)) from error
        self.usable = True
        if status:
            raise error_of(reply)
        return reply

    def close(self) -> None:
        """A call that another thread waits for ends as Broken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _wait_at_most(self, seconds: float) -> None:
        if seconds != self._patience:
            whole = max(seconds, 0.001)
            value = _TIMEVAL.pack(int(whole), int(whole % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._patience = seconds

    def _send(self, parts: list, bulk: Sequence[np.ndarray]) -> None:
        if bulk:
            parts += [array.data for array in bulk if len(array)]
        size = sum(map(len, parts))
        if size <= _SMALL:
            self._socket.sendall(b"".join(parts))
            return
        while parts:
            some, parts = parts[:_MOST_VECTORS], parts[_MOST_VECTORS:]
            sent = self._socket.sendmsg(some)
            for part in some:
                if sent < len(part):
                    self._socket.sendall(memoryview(part)[sent:])
                sent = max(0, sent - len(part))

    def _receive(self) -> tuple[Message, int]:
        data = self._socket.recv(_READ)
        while len(data) < HEADER.size:
            if not data:
                raise Broken("connection closed")
            more = self._socket.recv(_READ)
            if not more:
                raise Broken("connection closed")
            data += more
        try:
            header = wire.decode_header(data, wire.MAX_BODY, wire.MAX_BULK)
            end = HEADER.size + header.body_bytes
            if len(data) < end:
                body = bytearray(header.body_bytes)
                have = len(data) - HEADER.size
                body[:have] = data[HEADER.size :]
                self._into(memoryview(body)[have:])
                reply = wire.decode_body(header, memoryview(body))
            else:
                reply = wire.decode_body(header, memoryview(data)[HEADER.size : end])
        except WireError as error:
            raise Broken(str(error)) from error
        if header.bulk_bytes:
            bulk = self._pool.take(header.bulk_bytes)
            have = max(0, len(data) - end)
            if have > header.bulk_bytes:
                raise Broken("more bytes came than were announced")
            bulk[:have] = np.frombuffer(data, np.uint8, have, len(data) - have)
            self._into(bulk.data[have:])
            reply["bulk"] = bulk
        return reply, header.status

    def _into(self, view: memoryview) -> None:
        while len(view):
            count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            if not count:
                raise Broken("connection closed")
            view = view[count:]

    def _exactly(self, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        self._into(memoryview(buffer))
        return bytes(buffer)


def _connect_here(name: str) -> socket.socket | None:
    """A socket of this node costs half of what TCP does; None where there is none, as in another network namespace."""
    if not name:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{name}")
    except OSError:
        sock.close()
        return None
    return sock


def _connect(address: str, wait_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host, int(port)), timeout=wait_s)
    except OSError as error:
        raise Broken(str(error)) from error
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def error_of(reply: Message) -> AsyncFlowError:
    kind = getattr(errors, reply.text("error"), DockError)
    return kind(reply.text("text")) if issubclass(kind, AsyncFlowError) else DockError(reply.text("text"))
