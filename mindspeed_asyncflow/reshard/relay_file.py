"""The shared-memory file of a node's relay: `keep` + 1 equal slots, each the bytes of one weight version.

    | head page | table | slot 0: claims, checks, payload | slot 1 | ...

claims: int64 `assigned` version, then one int64 per writer; checks: uint32 crc and uint8 present per shard. Every part
begins on a page. A slot holds version v completely when `assigned` and all writers' entries say v; a writer that is not
done has another value there. All these words are aligned and written whole; a change of hands happens under a lock that
the kernel takes back from a process that dies. Writers of one file share nothing else and never wait for each other.

One slot more than versions are kept: a new version goes there, and the oldest is dropped when the new one is complete.
So the `keep` newest complete versions stay, as long as no writer is two versions ahead of another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.fingerprint import fingerprint
from mindspeed_asyncflow.reshard.relay_table import RelayTable, table_from_text

PAGE_BYTES = 4096
NOBODY = -1
_HEAD = struct.Struct("<8sIIQQ")  # magic, slots, writers, bytes of the table's text, bytes of the whole file
_MAGIC = b"AFRELAY2"
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_CHANGE, _IN_USE, _PULL, _WRITER = 0, 1, 2, 64  # bytes of the file that locks stand for; writer w: _WRITER + w
_LANDED = 1024  # where the head page counts the bytes of a pull
_LOCK_S = 20.0  # the lock of a change is held for microseconds
_POLL_S = 0.002


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class RelayFile:
    """One open relay file. `join` makes or enters it for writing, `look` maps it for reading."""

    def __init__(self, path: str, fd: int, table: RelayTable, writers: Sequence[int], keep: int, shared: bool) -> None:
        self.path, self.table, self.writers, self.keep = path, table, tuple(writers), keep
        self._fd = fd
        shards = len(table.shards)
        self._checks_at = pages(8 + 8 * len(writers))
        self._payload_at = self._checks_at + pages(5 * shards)
        self.stride = self._payload_at + pages(table.slot_bytes)
        self._slots_at = PAGE_BYTES + pages(len(_text(table, self.writers)))
        self.slots = keep + 1
        self.size = self._slots_at + self.slots * self.stride
        self.inode = os.fstat(fd).st_ino
        if shared and not os.fstat(fd).st_size:
            self._lay_out()
        found = os.fstat(fd).st_size
        if found < self.size:
            raise WeightSyncError(f"the relay {path} should have {self.size} bytes, but has only {found}")
        # Readers map privately: torch wants writable memory, and nobody there can change what was published.
        self.map = mmap.mmap(fd, self.size, flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.landed = self.bytes[_LANDED : _LANDED + 8].view(np.int64)
        starts = [self._slots_at + slot * self.stride for slot in range(self.slots)]
        claims = [self.bytes[s : s + 8 + 8 * len(writers)].view(np.int64) for s in starts]
        self.assigned, self.entries = [c[:1] for c in claims], [c[1:] for c in claims]
        checks = [self.bytes[s + self._checks_at :][: 5 * shards] for s in starts]
        self.crc = [c[: 4 * shards].view(np.uint32) for c in checks]
        self.present = [c[4 * shards :] for c in checks]

    @classmethod
    def join(
        cls, path: str, table: RelayTable, writers: Sequence[int], keep: int, go_on: bool = False
    ) -> RelayFile:  # fmt: skip
        """Make the file, or enter the one that others use. Raises `WeightSyncError` if theirs is a different one.

        What a run that died has left is made anew; `go_on`: taken over where it has the same layout.
        """
        if keep < 1:
            raise WeightSyncError(f"a relay keeps 1 version or more, got keep={keep}")
        made = None
        while made is None:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                with _locked(fd, _CHANGE, path):
                    if os.fstat(fd).st_nlink:  # else its last user removed it between our two steps
                        made = cls._enter(path, fd, table, tuple(writers), keep, go_on)
            finally:
                if made is None:
                    os.close(fd)
        return made

    @classmethod
    def _enter(
        cls, path: str, fd: int, table: RelayTable, writers: tuple[int, ...], keep: int, go_on: bool
    ) -> RelayFile | None:  # fmt: skip
        """The file of `fd`; None if a dead run had left it: then it is removed, and readers keep what they mapped."""
        alone = _lock(fd, _IN_USE, fcntl.F_WRLCK)
        begun = os.pread(fd, len(_MAGIC), 0)
        if begun.strip(b"\0"):
            theirs, their_writers, their_keep = _read_head(fd, path)
            same = (theirs.digest, their_writers, their_keep) == (table.digest, writers, keep)
            if not same and not alone:
                raise WeightSyncError(f"{path} is the relay of another layout; end what uses it first")
            left = alone and not (same and go_on)
        else:
            left = bool(begun)  # its maker died before it had a head
        if left:
            os.unlink(path)
            return None
        try:
            file = cls(path, fd, table, writers, keep, shared=True)
        except BaseException:
            if not begun:
                os.unlink(path)
            raise
        _lock(fd, _IN_USE, fcntl.F_RDLCK)
        return file

    @classmethod
    def look(cls, path: str) -> RelayFile:
        """Map an existing file for reading. Raises `WeightSyncError`."""
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise WeightSyncError(f"relay {path}: {error.strerror}") from error
        try:
            return cls(path, fd, *_read_head(fd, path), shared=False)
        finally:
            os.close(fd)

    def _lay_out(self) -> None:
        text = _text(self.table, self.writers)
        os.ftruncate(self._fd, self.size)
        for slot in range(self.slots):
            start = self._slots_at + slot * self.stride
            _allocate(self._fd, start, self._payload_at, self)
            os.pwrite(self._fd, np.full(1 + len(self.writers), NOBODY, np.int64).tobytes(), start)
        os.pwrite(self._fd, text, PAGE_BYTES)
        os.pwrite(self._fd, _HEAD.pack(_MAGIC, self.slots, len(self.writers), len(text), self.size), 0)

    def allocate(self, shards: Iterable[int]) -> None:
        """Take the memory of these shards in every slot now, or raise `WeightSyncError`."""
        runs: list[list[int]] = []
        for shard in sorted(shards):
            meta = self.table.shards[shard]
            if runs and meta.offset - runs[-1][1] <= PAGE_BYTES:
                runs[-1][1] = meta.offset + meta.nbytes
            else:
                runs.append([meta.offset, meta.offset + meta.nbytes])
        for slot in range(self.slots):
            for begin, end in runs:
                if end > begin:
                    _allocate(self._fd, self.payload_at(slot) + begin, end - begin, self)

    def payload_at(self, slot: int) -> int:
        """Byte offset in the file."""
        return self._slots_at + slot * self.stride + self._payload_at

    # -- versions --------------------------------------------------------------------------------------------------

    def complete(self, slot: int) -> int | None:
        """The version that this slot holds completely."""
        version = int(self.assigned[slot][0])
        return version if version != NOBODY and bool((self.entries[slot] == version).all()) else None

    def versions(self) -> tuple[int, ...]:
        """Complete versions, oldest first."""
        found = (self.complete(slot) for slot in range(self.slots))
        return tuple(sorted(v for v in found if v is not None))

    def slot_of(self, version: int) -> int:
        """Where the complete `version` lies. Raises `WeightSyncError` that names what is kept."""
        for slot in range(self.slots):
            if self.complete(slot) == version:
                return slot
        raise self._gone(version)

    def check(self, slot: int, version: int) -> None:
        """Raise `WeightSyncError` unless `slot` still holds the complete `version`."""
        if self.complete(slot) != version:
            raise self._gone(version)

    def _gone(self, version: int) -> WeightSyncError:
        kept = ", ".join(map(str, self.versions())) or "no complete version"
        return WeightSyncError(
            f"weight version {version} is not in the relay {self.path} (any more); it keeps {kept}: "
            "ask for a newer manifest"
        )

    def manifest(self, version: int, names: Iterable[str] | None = None) -> WeightManifest:
        """The manifest of a complete version; `names`: only these tensors."""
        slot, table = self.slot_of(version), self.table
        crc, present = self.crc[slot].copy(), self.present[slot].copy()
        shards, params = np.arange(len(crc)), table.params
        if names is not None:
            wanted = set(names)
            shards, params = table.shards_of(wanted), tuple(p for p in params if p.name in wanted)
        combined = self.fingerprint(slot, version)
        absent = shards[present[shards] == 0]
        if len(absent):
            raise WeightSyncError(
                f"{self.path} holds only a part of version {version}, not {table.describe(absent[0])}"
            )
        return WeightManifest(version, self.path, table.slot_bytes, params, tuple(crc[shards].tolist()), combined)

    def fingerprint(self, slot: int, version: int) -> str:
        """Of the complete `version` in `slot`."""
        crc = self.crc[slot].copy()
        self.check(slot, version)
        return fingerprint(self.table.digest, crc)

    # -- changes (files that were joined) --------------------------------------------------------------------------

    def changing(self) -> contextlib.AbstractContextManager[None]:
        return _locked(self._fd, _CHANGE, self.path)

    def own_writer(self, rank: int) -> int:
        """Claim the entry of `rank` for the life of this process; returns its place in `entries`."""
        if rank not in self.writers:
            raise WeightSyncError(f"rank {rank} is none of the writers {list(self.writers)} of {self.path}")
        place = self.writers.index(rank)
        if not _lock(self._fd, _WRITER + place, fcntl.F_WRLCK):
            raise WeightSyncError(f"another process writes to {self.path} as rank {rank}")
        return place

    def assign(self, version: int, place: int = 0) -> int:
        """The slot for `version`, for the writer at `place`: the one that has it already, or a dead or the oldest one,
        emptied."""
        if version < 0:
            raise WeightSyncError(f"a weight version is a whole number from 0, got {version}")
        with self.changing():
            held = [int(a[0]) for a in self.assigned]
            if version in held:
                return held.index(version)
            newest = max(self.versions(), default=NOBODY)

            def age(slot: int) -> tuple[bool, int]:
                skipped = held[slot] < version and int(self.entries[slot][place]) != held[slot]
                dead = self.complete(slot) is None and (skipped or held[slot] < newest)  # nobody will complete it
                return not dead, held[slot]

            slot = min(range(self.slots), key=age)
            self.assigned[slot][0] = NOBODY
            self.entries[slot][:] = NOBODY
            self.present[slot][:] = 0
            self.assigned[slot][0] = version
            return slot

    def fill(self, slot: int, version: int, place: int, shards: np.ndarray, crc: np.ndarray) -> None:
        """Note that these shards of `version` have arrived, and that the writer at `place` is done. The last one to be
        done drops the oldest version."""
        with self.changing():
            self.still_assigned(slot, version)
            self.crc[slot][shards] = crc
            self.present[slot][shards] = 1
            self.entries[slot][place] = version
            if self.complete(slot) is not None:
                others = [v for v in self.versions() if v != version]
                for old in others[: max(0, len(others) + 1 - self.keep)]:
                    self.assigned[self.slot_of(old)][0] = NOBODY

    def still_assigned(self, slot: int, version: int) -> None:
        if int(self.assigned[slot][0]) != version:
            raise WeightSyncError(
                f"weight version {version} was overtaken in {self.path} by {int(self.assigned[slot][0])} before it was "
                f"complete; it keeps {self.keep} versions"
            )

    @contextlib.contextmanager
    def pulling(self, timeout_s: float, what: str) -> Iterator[None]:
        """One thread of one process at a time pulls into this file; the others wait as long as its bytes keep coming.

        Raises `DeadlineExceeded` after `timeout_s` without any.
        """
        fd = os.open(self.path, os.O_RDWR)  # a lock belongs to an open file, and threads share `_fd`
        try:
            with _locked(fd, _PULL, what, timeout_s, lambda: int(self.landed[0])):
                yield
        finally:
            os.close(fd)

    def close(self) -> None:
        """Leave the file; the last one out removes it. What others have mapped stays readable."""
        if self._fd < 0:
            return
        with self.changing():
            if _lock(self._fd, _IN_USE, fcntl.F_WRLCK):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path)
            _lock(self._fd, _IN_USE, fcntl.F_UNLCK)  # the mapping would hold it longer than the descriptor
        os.close(self._fd)
        self._fd = -1


def _text(table: RelayTable, writers: Sequence[int]) -> bytes:
    return msgspec.msgpack.encode((table.text, list(writers)))


def _read_head(fd: int, path: str) -> tuple[RelayTable, tuple[int, ...], int]:
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size or head[: len(_MAGIC)] != _MAGIC:
        raise WeightSyncError(f"{path} is not a relay (yet)")
    _, slots, _, nbytes, _ = _HEAD.unpack(head)
    text, writers = msgspec.msgpack.decode(os.pread(fd, nbytes, PAGE_BYTES), type=tuple[bytes, list[int]])
    return table_from_text(text), tuple(writers), slots - 1


def _allocate(fd: int, begin: int, nbytes: int, file: RelayFile) -> None:
    try:
        os.posix_fallocate(fd, begin, nbytes)  # tmpfs hands out every page now, or refuses
    except OSError as error:
        raise WeightSyncError(
            f"{file.slots} weight versions of {file.table.slot_bytes} bytes do not fit into {file.path}: "
            f"{error.strerror}; free shared memory or mount a larger /dev/shm"
        ) from error


def _lock(fd: int, byte: int, kind: int) -> bool:
    """Take (or give back) one byte's lock without waiting. It belongs to the open file and dies with it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


@contextlib.contextmanager
def _locked(
    fd: int, byte: int, what: str, timeout_s: float = _LOCK_S, progress: Callable[[], int] = lambda: 0
) -> Iterator[None]:  # fmt: skip
    """Hold a byte's lock. Raises `DeadlineExceeded` after `timeout_s` in which `progress` did not change."""
    seen, since = progress(), time.monotonic()
    while not _lock(fd, byte, fcntl.F_WRLCK):
        time.sleep(_POLL_S)
        if progress() != seen:
            seen, since = progress(), time.monotonic()
        elif time.monotonic() - since > timeout_s:
            raise DeadlineExceeded(f"another process that is at {what} made no progress for {timeout_s:g} s")
    try:
        yield
    finally:
        _lock(fd, byte, fcntl.F_UNLCK)
