"""How mirrors and relay servers talk: the dock's frames and greeting, three questions, answers with bulk behind them.

    INFO   version (-1: the newest)  →  version, versions, digest of the table, crc uint32 [S], present uint8 [S]
    TABLE                            →  text of the table, uint8
    FETCH  version, anchor (-1: none), block, ranges int64 [3, k] (shard, begin, end)
                                     →  sizes int64 [k], deltas uint8 [k], then the ranges' bytes one after the other

Before the first question a server sends 32 random bytes and is told what only the holder of the run's secret can say.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.channel import Broken, error_of
from mindspeed_asyncflow.dock.wire import HEADER, Message, WireError

NEWEST = NO_ANCHOR = -1
MOST_RANGES = 1 << 10  # of one FETCH: a question fits into the buffers of a link whose server is busy answering
MOST_FETCH_BYTES = 1 << 26  # of the ranges of one FETCH
MOST_QUESTION_BYTES = 1 << 20


class Question(IntEnum):
    HELLO = 1
    INFO = 2
    TABLE = 3
    FETCH = 4


class RelayLink:
    """One blocking connection to a relay server. Raises `Broken`.

    `silence_s`: how long it may say nothing; `heard` is told how many bytes came after the greeting, when some did.
    """

    def __init__(self, address: str, secret: bytes, silence_s: float, heard: Callable[[int], None]) -> None:
        self.filled = 0  # bytes that the last `into` got
        self._questions = 0
        self._heard: Callable[[int], None] = lambda _: None
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=silence_s)
        except OSError as error:
            raise Broken(str(error)) from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = bytearray(wire.CHALLENGE_BYTES)
            self.into(memoryview(challenge))
            self.ask(Question.HELLO, {"answer": wire.answer(secret, bytes(challenge))})
            self.answer()
            self._heard = heard
        except BaseException as error:  # boundary: a socket that was opened is closed, whatever went wrong
            self._socket.close()
            if isinstance(error, Broken):
                raise Broken(f"{error} during the greeting (has it another secret?)") from None
            raise

    def ask(self, question: Question, message: Mapping[str, Any]) -> None:
        """Send a question; its answer comes after those of the questions before it."""
        self._questions += 1
        try:
            self._socket.sendall(wire.frame(question, 0, 0, self._questions, message))
        except OSError as error:
            raise Broken(str(error)) from error

    def answer(self) -> tuple[Message, int]:
        """The next answer and how many bytes follow it. Raises what the server says is wrong."""
        head = bytearray(HEADER.size)
        self.into(memoryview(head))
        try:
            header = wire.decode_header(head, wire.MAX_BODY, MOST_FETCH_BYTES)
            body = bytearray(header.body_bytes)
            self.into(memoryview(body))
            message = wire.decode_body(header, memoryview(body))
        except WireError as error:
            raise Broken(str(error)) from error
        if header.status:
            raise error_of(message)
        return message, header.bulk_bytes

    def into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes."""
        self.filled = 0
        while len(view):
            try:
                count = self._socket.recv_into(view)
            except TimeoutError:
                raise Broken("it says nothing") from None
            except OSError as error:
                raise Broken(str(error)) from error
            if not count:
                raise Broken("it closed the connection")
            self._heard(count)
            self.filled += count
            view = view[count:]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> RelayLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
