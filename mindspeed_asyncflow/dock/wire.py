"""Frames between dock processes: a fixed header, plain values as MessagePack, arrays as raw bytes. No pickle, no code.

    header (48 bytes) | MessagePack [plain values, [[name, dtype, shape], ...]] | arrays, each 8-aligned | bulk

The bulk of a frame (`bulk_bytes` of its header) is the values of cells, one part of a column after the other: it never
passes through a buffer of the server, but is received into the arena and sent from it. Sizes are checked before memory
is taken, dtypes and shapes before an array is made. Little-endian throughout.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from mindspeed_asyncflow.dock.columns import NUMPY
from mindspeed_asyncflow.errors import DockError

MAGIC = b"AFDK"
VERSION = 2
HEADER = struct.Struct("<4sHHIIQQQQ")  # magic, version, verb, status, plain bytes, client, request, body, bulk bytes
CHALLENGE_BYTES = 32
MAX_PLAIN = 4 << 20
MAX_BODY = 256 << 20
MAX_BULK = 1 << 40
MAX_ARRAYS = 256
_FEW_BYTES = 1 << 13  # arrays up to this size are copied: cheaper than a view
_PADDING = tuple(bytes(n) for n in range(8))


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
    TASK = 14
    CLOSE = 15
    FINISH = 16
    CHECK = 17
    JOIN = 19
    MIRROR = 20
    LOST = 21
    FREEZE = 22
    THAW = 23
    EXPORT = 24
    CANCEL = 25
    FIND = 26
    FORGET_PAIR = 27
    DIVIDE = 28
    RENEW = 29


class WireError(DockError):
    """A frame is malformed: the connection that sent it is closed."""


class Header(NamedTuple):
    verb: int
    status: int  # 0: fine; 1: the body describes an error
    plain_bytes: int
    client: int  # identity of the sender, random per client
    request: int  # rises per client; (client, request) names one call for ever
    body_bytes: int
    bulk_bytes: int = 0


def _no_extension(code: int, data: memoryview) -> NoReturn:
    raise WireError(f"a frame carries an extension type {code}")


_names = {dtype: name for name, dtype in NUMPY.items()}
_encode = msgspec.msgpack.Encoder().encode
_Description = tuple[dict[str, Any], list[tuple[str, str, list[int]]]]
_decode = msgspec.msgpack.Decoder(_Description, ext_hook=_no_extension).decode


def encode(
    verb: int, status: int, client: int, request: int, message: Mapping[str, Any], bulk_bytes: int = 0
) -> list[memoryview | bytes]:
    """Buffers to be sent one after the other; large arrays are not copied. The bulk is sent by the caller."""
    plain: dict[str, Any] = {}
    table: list[tuple[str, str, tuple[int, ...]]] = []
    out: list[memoryview | bytes] = [b"", b""]
    size = 0
    for name, value in message.items():
        if type(value) is not np.ndarray:
            plain[name] = value
            continue
        table.append((name, _names[value.dtype], value.shape))
        nbytes = value.nbytes
        if nbytes:
            if nbytes <= _FEW_BYTES:
                out.append(value.tobytes())
            else:
                out.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            pad = -nbytes & 7
            if pad:
                out.append(_PADDING[pad])
            size += nbytes + pad
    try:
        text = _encode((plain, table))
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise WireError(f"a call carries what no frame can: {error}") from error
    pad = -len(text) & 7
    size += len(text) + pad
    if size > MAX_BODY or len(text) > MAX_PLAIN:
        raise WireError(f"a call of {size} bytes is larger than the {MAX_BODY} that a frame holds; name fewer rows")
    out[0] = HEADER.pack(MAGIC, VERSION, verb, status, len(text), client, request, size, bulk_bytes)
    out[1] = text + _PADDING[pad]
    return out


def frame(verb: int, status: int, client: int, request: int, message: Mapping[str, Any], bulk_bytes: int = 0) -> bytes:
    """As `encode`, in one buffer."""
    return b"".join(encode(verb, status, client, request, message, bulk_bytes))


def decode_header(raw: bytes | bytearray | memoryview, most_bytes: int, most_bulk: int = 0) -> Header:
    """Raises WireError when this is no header of ours or announces more than `most_bytes` of body."""
    magic, version, verb, status, plain, client, request, body, bulk = HEADER.unpack_from(raw)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"a frame begins with {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    if body > most_bytes or bulk > most_bulk or plain > min(body, MAX_PLAIN):
        raise WireError(
            f"a frame announces {body} bytes ({plain} of plain values) and {bulk} of bulk, "
            f"at most {most_bytes} and {most_bulk} are accepted"
        )
    return Header(verb, status, plain, client, request, body, bulk)


def decode_body(header: Header, body: memoryview) -> Message:
    """The message of a frame; its arrays are views into `body`. Raises WireError when it does not fit together."""
    if len(body) != header.body_bytes:
        raise WireError(f"a frame of {header.body_bytes} bytes came with {len(body)}")
    try:
        plain, table = _decode(body[: header.plain_bytes])
    except (ValueError, RecursionError) as error:
        raise WireError(f"the description of a frame is not what it should be: {error}") from error
    if len(table) > MAX_ARRAYS:
        raise WireError(f"a frame carries {len(table)} arrays, at most {MAX_ARRAYS} are accepted")
    message = Message(plain)
    begin = header.plain_bytes + (-header.plain_bytes & 7)
    for name, kind, shape in table:
        dtype = NUMPY.get(kind)
        if dtype is None or not 1 <= len(shape) <= 4 or min(shape) < 0 or max(shape) > MAX_BODY:
            raise WireError(f"array {name!r} has an impossible dtype or shape")
        end = begin + math.prod(shape) * dtype.itemsize
        if end > header.body_bytes:
            raise WireError(f"array {name!r} is longer than its frame")
        array = np.frombuffer(body[begin:end], dtype)
        message[name] = array if len(shape) == 1 else array.reshape(shape)
        begin = end + (-end & 7)
    if begin != header.body_bytes:
        raise WireError(f"a frame has {header.body_bytes} bytes, its arrays end at {begin}")
    return message


class Message(dict):
    """A decoded message. The getters check the type of what a peer sent, so that verbs need not."""

    def text(self, name: str) -> str:
        return self._get(name, str)

    def whole(self, name: str) -> int:
        value = self._get(name, int)
        if not -1 << 63 <= value < 1 << 63:
            raise WireError(f"{name!r} has more than 64 bits")
        return value

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

    def optional_ints(self, name: str, dtype: str = "int64") -> np.ndarray | None:
        return None if self.get(name) is None else self.ints(name, dtype)

    def ints(self, name: str, dtype: str = "int64") -> np.ndarray:
        """One-dimensional array."""
        return self.array(name, dtype)

    def array(self, name: str, dtype: str) -> np.ndarray:
        value = self._get(name, np.ndarray)
        if value.dtype != NUMPY[dtype] or value.ndim != 1:
            raise WireError(f"{name!r} should be {dtype} [n], got {value.dtype} {list(value.shape)}")
        return value

    def matrix(self, name: str, rows: int) -> np.ndarray:
        """int64 [rows, n]"""
        value = self._get(name, np.ndarray)
        if value.dtype != np.int64 or value.ndim != 2 or len(value) != rows:
            raise WireError(f"{name!r} should be int64 [{rows}, n], got {value.dtype} {list(value.shape)}")
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
