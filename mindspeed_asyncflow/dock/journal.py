"""What a pair has done, in shared memory beside its arena: a restarted pair reads it and goes on.

One entry per call: all its effects on state (rows put, columns written, rows done, rows gone, ...) and its answer,
written before the caller gets that answer. An entry that was cut short by the death of its writer is ignored: its
caller got no answer and repeats the call, and a call that is complete is answered again, not carried out again. When
the file has grown to a multiple of the state that it describes, a fresh description replaces it in one rename.

    magic | arena token | entries:  length u32, crc32 u32, MessagePack [[kind, plain values, {name: [dtype, bytes]}]]
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mindspeed_asyncflow.errors import DockError, DockFull, PlatformError

MAGIC = b"AFJRNL01"
_ENTRY = struct.Struct("<II")
_DTYPES = ("int64", "int32", "float64", "bool")
_NAMES = {np.dtype(name): name for name in _DTYPES}
_AHEAD = 1 << 20  # bytes that are there beyond what a call may need, for what no call announces (leases, waiting puts)
_encode = msgspec.msgpack.Encoder().encode
_Packed = tuple[str, dict[str, Any], dict[str, tuple[str, bytes]]]
_decode = msgspec.msgpack.Decoder(list[_Packed]).decode

Effect = tuple[str, Mapping[str, Any]]  # kind; plain values and arrays


class Journal:
    """`limit_bytes`: from this size on, `outgrown` asks for a fresh description."""

    def __init__(self, path: str, token: bytes, limit_bytes: int = 64 << 20) -> None:
        self.path, self._token = path, token
        self._limit = limit_bytes
        self._file = -1
        self._pending: list[_Packed] = []
        self._allocated = 0
        self.size = 0  # bytes

    def start(self, effects: Iterable[Effect]) -> None:
        """Replaces the file, atomically, by one that describes the state by `effects`."""
        fresh = f"{self.path}.new"
        fd = -1
        try:
            fd = os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            size = _write(fd, MAGIC + self._token, 0)
            for effect in effects:
                size += _write(fd, _entry([_pack(*effect)]), size)
            os.rename(fresh, self.path)
            self._pending.clear()  # they are part of that state
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
                os.close(fd)
            raise PlatformError(f"the dock journal {self.path} cannot be written: {error.strerror}") from error
        if self._file >= 0:
            os.close(self._file)
        self._file, self.size, self._allocated = fd, size, size
        self._limit = max(self._limit, 4 * size)

    @property
    def outgrown(self) -> bool:
        return self.size > self._limit

    def postpone(self) -> None:
        """There was no memory for a fresh description: look again when the file has doubled."""
        self._limit = 2 * self.size

    def ensure_room(self, nbytes: int) -> None:
        """Raises DockFull when the memory of this node cannot take an entry of `nbytes`. Before anything is changed."""
        wanted = self.size + nbytes + _AHEAD
        if wanted <= self._allocated:
            return
        try:
            os.posix_fallocate(self._file, self._allocated, wanted + _AHEAD - self._allocated)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DockFull(
                f"shared memory is full: the dock journal cannot note {nbytes} more bytes; free some of it"
            ) from error
        self._allocated = wanted + _AHEAD

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """An effect of the call under way."""
        self._pending.append(_pack(kind, fields))

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def flush(self) -> None:
        """Writes what was noted, as one entry."""
        if self._pending:
            self.size += _write(self._file, _entry(self._pending), self.size)
            self._pending = []

    def close(self, remove: bool) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if remove:
            Path(self.path).unlink(missing_ok=True)


def read_journal(path: str, token: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The effects of all complete entries, in order. Raises DockError when it does not belong to the arena `token`,
    or when an entry before the last one is damaged."""
    raw = memoryview(Path(path).read_bytes())
    begin = len(MAGIC) + len(token)
    if bytes(raw[:begin]) != MAGIC + token:
        raise DockError(f"{path} is not the journal of this arena; remove both files to start an empty dock")
    while begin + _ENTRY.size <= len(raw):
        length, checksum = _ENTRY.unpack_from(raw, begin)
        body = raw[begin + _ENTRY.size : begin + _ENTRY.size + length]
        if not length or len(body) < length or zlib.crc32(body) != checksum:
            if bytes(raw[begin + _ENTRY.size + length :]).strip(b"\0"):
                raise DockError(f"{path} is damaged {begin} bytes from its start")
            return  # nothing was written here, or it was cut short
        for packed in _decode(body):
            yield _unpack(packed)
        begin += _ENTRY.size + length


def _pack(kind: str, fields: Mapping[str, Any]) -> _Packed:
    plain: dict[str, Any] = {}
    arrays: dict[str, tuple[str, bytes]] = {}
    for name, value in fields.items():
        if type(value) is np.ndarray:
            arrays[name] = (_NAMES[value.dtype], value.tobytes())
        else:
            plain[name] = value
    return kind, plain, arrays


def _entry(packed: list[_Packed]) -> bytes:
    body = _encode(packed)
    return _ENTRY.pack(len(body), zlib.crc32(body)) + body


def _unpack(packed: _Packed) -> tuple[str, dict[str, Any]]:
    kind, fields, arrays = packed
    for name, (dtype, raw) in arrays.items():
        if dtype not in _DTYPES:
            raise DockError(f"a journal entry has an array {name!r} of dtype {dtype!r}")
        fields[name] = np.frombuffer(raw, dtype)
    return kind, fields


def _write(fd: int, data: bytes, at: int) -> int:
    """All of `data` at byte `at`; returns its length."""
    done = os.pwrite(fd, data, at)
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], at + done)
    return len(data)
