"""Frames between dock processes: a fixed header, plain values as JSON, arrays as raw bytes. No pickle, no code.

    header (40 bytes) | JSON of the plain values and of the arrays' names, dtypes, shapes | arrays, each 8-aligned

Sizes are checked before memory is taken, dtypes and shapes before an array is made. Little-endian throughout.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.columns import DTYPES
from mindspeed_asyncflow.errors import DockError

MAGIC = b"AFDK"
VERSION = 1
HEADER = struct.Struct("<4sHHIIQQQ")  # magic, version, verb, status, JSON bytes, client, request, body bytes
CHALLENGE_BYTES = 32
MAX_JSON = 4 << 20
MAX_ARRAYS = 256


class Verb(IntEnum):
    HELLO = 1
    RESERVE = 2
    PUT = 3
    CLAIM = 4
    READ = 5
    WRITE = 6
    DONE = 7
    RELEASE = 8
    DROP = 9
    FREE = 10
    SEAL = 11
    FORGET = 12
    STATS = 13


class WireError(DockError):
    """A frame is malformed: the connection that sent it is closed."""


@dataclass(frozen=True, slots=True)
class Header:
    verb: int
    status: int  # 0: fine; 1: the body describes an error
    json_bytes: int
    client: int  # identity of the sender, random per client
    request: int  # rises per client; (client, request) names one call for ever
    body_bytes: int


def encode(verb: int, status: int, client: int, request: int, message: Mapping[str, Any]) -> list[memoryview | bytes]:
    """Buffers to be sent one after the other; arrays are not copied."""
    plain: dict[str, Any] = {}
    table: list[tuple[str, str, list[int]]] = []
    frames: list[np.ndarray] = []
    for name, value in message.items():
        if isinstance(value, np.ndarray):
            value = np.ascontiguousarray(value)
            table.append((name, value.dtype.name, list(value.shape)))
            frames.append(value)
        else:
            plain[name] = value
    text = json.dumps([plain, table], separators=(",", ":")).encode()
    out: list[memoryview | bytes] = [text, bytes(-len(text) % 8)]
    size = len(text) + len(out[1])
    for frame in frames:
        if frame.nbytes:
            out.append(frame.reshape(-1).view(np.uint8).data)
            out.append(bytes(-frame.nbytes % 8))
            size += frame.nbytes + len(out[-1])
    return [HEADER.pack(MAGIC, VERSION, verb, status, len(text), client, request, size), *out]


def decode_header(raw: bytes | bytearray | memoryview, most_bytes: int) -> Header:
    """Raises WireError when this is no header of ours or announces more than `most_bytes` of body."""
    magic, version, verb, status, json_bytes, client, request, body = HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"a frame begins with {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    if body > most_bytes or json_bytes > min(body, MAX_JSON):
        raise WireError(f"a frame announces {body} bytes ({json_bytes} of JSON), at most {most_bytes} are accepted")
    return Header(verb, status, json_bytes, client, request, body)


def decode_body(header: Header, body: memoryview) -> Message:
    """The message of a frame; its arrays are views into `body`. Raises WireError when it does not fit together."""
    if len(body) != header.body_bytes:
        raise WireError(f"a frame of {header.body_bytes} bytes came with {len(body)}")
    try:
        plain, table = json.loads(bytes(body[: header.json_bytes]))
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError("a frame's description is not the JSON that it should be") from error
    if not isinstance(plain, dict) or not isinstance(table, list) or len(table) > MAX_ARRAYS:
        raise WireError("a frame's description has the wrong form")
    message = Message(plain)
    begin = header.json_bytes + -header.json_bytes % 8
    for entry in table:
        name, dtype, shape = _array_entry(entry)
        count = 1
        for extent in shape:
            count *= extent
        end = begin + count * np.dtype(dtype).itemsize
        if end > header.body_bytes:
            raise WireError(f"array {name!r} is longer than its frame")
        message[name] = np.frombuffer(body[begin:end], dtype).reshape(shape)
        begin = end + -end % 8
    if begin != header.body_bytes:
        raise WireError(f"a frame has {header.body_bytes} bytes, its arrays end at {begin}")
    return message


def _array_entry(entry: Any) -> tuple[str, str, list[int]]:
    if not (isinstance(entry, list) and len(entry) == 3):
        raise WireError("an array needs name, dtype and shape")
    name, dtype, shape = entry
    fits = isinstance(name, str) and dtype in DTYPES and isinstance(shape, list) and 1 <= len(shape) <= 4
    if not fits or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
        raise WireError(f"array {name!r} has an impossible dtype or shape")
    return name, dtype, shape


class Message(dict):
    """A decoded message. The getters check the type of what a peer sent, so that verbs need not."""

    def text(self, name: str) -> str:
        return self._get(name, str)

    def whole(self, name: str) -> int:
        return self._get(name, int)

    def real(self, name: str) -> float:
        value = float(self._get(name, (int, float)))
        if not math.isfinite(value):
            raise WireError(f"{name!r} is not a finite number")
        return value

    def flag(self, name: str) -> bool:
        return self._get(name, bool)

    def names(self, name: str) -> list[str]:
        values = self._get(name, list)
        if not all(isinstance(v, str) for v in values):
            raise WireError(f"{name!r} should be a list of names")
        return values

    def optional_whole(self, name: str) -> int | None:
        return None if self.get(name) is None else self.whole(name)

    def optional_ints(self, name: str) -> np.ndarray | None:
        return None if self.get(name) is None else self.ints(name)

    def ints(self, name: str, dtype: str = "int64") -> np.ndarray:
        """One-dimensional array."""
        return self.array(name, dtype)

    def array(self, name: str, dtype: str) -> np.ndarray:
        value = self._get(name, np.ndarray)
        if value.dtype != dtype or value.ndim != 1:
            raise WireError(f"{name!r} should be {dtype} [n], got {value.dtype} {list(value.shape)}")
        return value

    def _get(self, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise WireError(f"{name!r} is missing or of the wrong type")
        return value


def answer(secret: bytes, challenge: bytes) -> np.ndarray:
    """What a client that knows `secret` says to `challenge`; uint8 [32]."""
    return np.frombuffer(hmac.digest(secret, challenge, hashlib.sha256), np.uint8)


def knows_secret(secret: bytes, challenge: bytes, given: np.ndarray) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(answer(secret, challenge).tobytes(), given.tobytes())
