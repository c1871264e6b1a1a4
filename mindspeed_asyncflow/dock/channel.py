"""One connection from a client to a dock server: one call at a time, one frame there and one back."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from mindspeed_asyncflow import errors
from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.wire import HEADER, Message, Verb, WireError
from mindspeed_asyncflow.errors import AsyncFlowError, DeadlineExceeded, DockError

_GRACE_S = 10.0  # beyond the deadline that the server keeps by itself
_MOST_BYTES = 1 << 40  # an answer is as large as what was asked for


class Broken(Exception):
    """The connection ended before the answer came."""


class Channel:
    def __init__(self, address: str, secret: bytes, client: int, wait_s: float) -> None:
        self.address, self._client, self._wait_s = address, client, wait_s
        self.usable = False
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=wait_s)
        except OSError as error:
            raise Broken(str(error)) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            challenge = self._receive(wire.CHALLENGE_BYTES)
            self.hello = self.call(Verb.HELLO, 0, {"answer": wire.answer(secret, bytes(challenge))})
        except BaseException as error:
            self._socket.close()
            if isinstance(error, OSError):
                raise Broken(str(error)) from error
            raise

    def call(self, verb: Verb, request: int, message: Mapping[str, Any]) -> Message:
        """The answer. Raises what the server answered if that is an error, Broken, or DeadlineExceeded.

        `usable` is False afterwards when the connection is in the middle of something and can carry no other call.
        """
        self.usable = False
        patience = float(message.get("timeout_s", self._wait_s)) + _GRACE_S
        self._socket.settimeout(patience)
        try:
            self._send(wire.encode(verb, 0, self._client, request, message))
            header = wire.decode_header(self._receive(HEADER.size), _MOST_BYTES)
            body = self._receive(header.body_bytes)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the dock server at {self.address} did not answer {verb.name} within {patience:g} s"
            ) from None
        except (OSError, WireError) as error:
            raise Broken(str(error)) from error
        reply = wire.decode_body(header, memoryview(body))
        self.usable = True
        if header.status:
            raise _error(reply)
        return reply

    def close(self) -> None:
        self._socket.close()

    def _send(self, parts: list) -> None:
        size = sum(len(part) for part in parts)
        if size <= 1 << 18:
            self._socket.sendall(b"".join(parts))
        else:
            for part in parts:
                self._socket.sendall(part)

    def _receive(self, nbytes: int) -> bytearray:
        buffer = bytearray(nbytes)
        view = memoryview(buffer)
        while len(view):
            count = self._socket.recv_into(view)
            if not count:
                raise Broken("connection closed")
            view = view[count:]
        return buffer


def _error(reply: Message) -> AsyncFlowError:
    kind = getattr(errors, reply.text("error"), DockError)
    return kind(reply.text("text")) if issubclass(kind, AsyncFlowError) else DockError(reply.text("text"))
