"""The data plane of one node: a shared-memory arena and the map from cells (row or group, column) to bytes.

The arena is one file, touched once and recycled for ever: no write creates a segment. Space is handed out in
granules of 64 bytes. One write reserves one extent and packs the rows of each column back to back in it, so a cell
has no padding of its own and starts anywhere. A granule is free again when the last cell that touches it is released:
interior granules belong to one cell, and only the first and last granule of a cell can be shared, so a reference
count is kept for these alone. The work of a release depends on the cells released, not on bytes or on the rows alive.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mindspeed_asyncflow.dock.columns import ColumnSpec, Ragged
from mindspeed_asyncflow.errors import DockError, DockFull, PlatformError

GRANULE = 64  # bytes
TOKEN_BYTES = 32  # at the start of the arena: tells a client that it mapped the right file
SHM_DIR = "/dev/shm"


class Arena:
    """One shared-memory file, mapped. Offsets are bytes from its start; the first granule is reserved."""

    def __init__(self, path: str, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self.bytes = np.frombuffer(mapping, np.uint8)
        self._views: dict[str, np.ndarray] = {}

    @classmethod
    def create(cls, path: str | None, nbytes: int) -> Arena:
        """Creates and touches the file. Raises PlatformError when the memory or the name is not available."""
        path = path or f"{SHM_DIR}/asyncflow-dock-{os.getpid()}-{secrets.token_hex(4)}"
        nbytes = -(-nbytes // GRANULE) * GRANULE
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise PlatformError(f"the dock arena {path} cannot be created: {error.strerror}") from error
        try:
            os.posix_fallocate(fd, 0, nbytes)  # without it, missing memory would be a bus error at the first touch
            arena = cls(path, mmap.mmap(fd, nbytes))
        except OSError as error:
            os.unlink(path)
            raise PlatformError(
                f"{nbytes >> 20} MiB of shared memory for the dock are not available ({error.strerror}); "
                "lower dock.arena_mb"
            ) from error
        finally:
            os.close(fd)
        arena.bytes.fill(0)
        arena.bytes[:TOKEN_BYTES] = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), np.uint8)
        return arena

    @classmethod
    def attach(cls, path: str, token: bytes) -> Arena | None:
        """Maps the arena of a server on this node; None when the file is not the one that carries `token`."""
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            return None
        try:
            mapping = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        finally:
            os.close(fd)
        arena = cls(path, mapping)
        return arena if arena.token == token else None

    @property
    def token(self) -> bytes:
        return self.bytes[:TOKEN_BYTES].tobytes()

    def view(self, dtype: str) -> np.ndarray:
        """The whole arena as a read-only array of `dtype`; element i is at byte i * itemsize."""
        if dtype not in self._views:
            whole = self.bytes.view(dtype)
            whole.flags.writeable = False
            self._views[dtype] = whole
        return self._views[dtype]

    def ragged(self, spec: ColumnSpec, offsets: np.ndarray, lengths: np.ndarray) -> Ragged:
        """Cells at byte `offsets` as views."""
        return Ragged(self.view(spec.dtype), offsets // spec.itemsize, lengths)

    def store(self, offset: int, values: np.ndarray) -> None:
        """Copies `values` (contiguous) to byte `offset`."""
        self.bytes[offset : offset + values.nbytes] = values.view(np.uint8)

    def unlink(self) -> None:
        Path(self.path).unlink(missing_ok=True)


class FreeList:
    """Free granules as sorted, disjoint, never adjoining runs; first fit."""

    def __init__(self, start: int, end: int) -> None:
        self._starts = np.array([start], np.int64)
        self._ends = np.array([end], np.int64)
        self.total = end - start

    @property
    def largest(self) -> int:
        return int((self._ends - self._starts).max(initial=0))

    def take(self, count: int) -> int | None:
        """First granule of a run of `count`, or None."""
        fits = self._ends - self._starts >= count
        i = int(np.argmax(fits)) if len(fits) else 0
        if not len(fits) or not fits[i]:
            return None
        start = int(self._starts[i])
        self._starts[i] += count
        if self._starts[i] == self._ends[i]:
            self._starts, self._ends = np.delete(self._starts, i), np.delete(self._ends, i)
        self.total -= count
        return start

    def give(self, starts: np.ndarray, ends: np.ndarray) -> None:
        """Returns disjoint runs [starts, ends)."""
        self.total += int((ends - starts).sum())
        starts, ends = np.concatenate((self._starts, starts)), np.concatenate((self._ends, ends))
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        apart = starts[1:] != ends[:-1]  # runs that touch become one
        self._starts = starts[np.concatenate(([True], apart))]
        self._ends = ends[np.concatenate((apart, [True]))]


def layout(lengths: Mapping[str, np.ndarray], specs: Mapping[str, ColumnSpec]) -> tuple[dict[str, int], int]:
    """Where each column's packed values begin in one extent, in bytes, and the size of the extent. Pure."""
    begins, total = {}, 0
    for name, column in lengths.items():
        begins[name] = total
        total += -(-int(column.sum()) * specs[name].itemsize // GRANULE) * GRANULE
    return begins, total


def check_fits(nbytes: int, most: int) -> None:
    """Raises DockFull for values that can never be stored at once."""
    if nbytes > most:
        raise DockFull(
            f"{nbytes} bytes at once can never fit: the arena takes at most {most} from one call of this kind; "
            "raise dock.arena_mb or send fewer rows"
        )


class Cells:
    """Byte offset and length in elements of one column's cells, by slot (or by group slot for a shared column)."""

    def __init__(self, spec: ColumnSpec) -> None:
        self.spec = spec
        self.offsets = np.zeros(0, np.int64)
        self.lengths = np.zeros(0, np.int64)

    def ensure(self, capacity: int) -> None:
        if capacity > len(self.offsets):
            grow = np.zeros(max(capacity, 2 * len(self.offsets), 256) - len(self.offsets), np.int64)
            self.offsets = np.concatenate((self.offsets, grow))
            self.lengths = np.concatenate((self.lengths, grow))


class Warehouse:
    """Bytes of one node. A cell is (partition number, column, index); who may use it is the controller's business."""

    def __init__(self, columns: Sequence[ColumnSpec], arena: Arena) -> None:
        self.specs = {c.name: c for c in columns}
        self.arena = arena
        self._granules = len(arena.bytes) // GRANULE
        self._free = FreeList(1, self._granules)
        self._edges = np.zeros(self._granules, np.uint8)  # cells that begin or end in a granule, at most 64
        self._cells: dict[tuple[int, str], Cells] = {}
        self.payload_bytes = 0  # of live cells

    @property
    def capacity_bytes(self) -> int:
        return (self._granules - 1) * GRANULE

    @property
    def free_bytes(self) -> int:
        return self._free.total * GRANULE

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    def reserve(self, nbytes: int) -> int | None:
        """Byte offset of an extent, or None when no free run is long enough now."""
        if nbytes == 0:
            return GRANULE
        start = self._free.take(-(-nbytes // GRANULE))
        return None if start is None else start * GRANULE

    def cancel(self, offset: int, nbytes: int) -> None:
        """Returns a reserved extent that no cell was placed in."""
        if nbytes:
            start = offset // GRANULE
            self._free.give(np.array([start]), np.array([start + -(-nbytes // GRANULE)]))

    def place(
        self, partition: int, column: str, index: np.ndarray, begin: int, lengths: np.ndarray, keep: np.ndarray
    ) -> None:
        """Makes the packed values at byte `begin` the cells `index`; those with `keep` False are given back."""
        spec = self.specs[column]
        offsets = begin + (np.cumsum(lengths) - lengths) * spec.itemsize
        first, last, _ = self._span(offsets, lengths, spec)
        np.add.at(self._edges, first, 1)
        np.add.at(self._edges, last[last > first], 1)
        if not keep.all():
            self._drop(offsets[~keep], lengths[~keep], spec)
            index, offsets, lengths = index[keep], offsets[keep], lengths[keep]
        cells = self._table(partition, column)
        if len(index):
            cells.ensure(int(index.max()) + 1)
        cells.offsets[index] = np.where(lengths > 0, offsets, 0)
        cells.lengths[index] = lengths
        self.payload_bytes += int(lengths.sum()) * spec.itemsize

    def locate(self, partition: int, column: str, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Byte offsets and lengths (elements) of cells that were placed."""
        cells = self._table(partition, column)
        return cells.offsets[index], cells.lengths[index]

    def read(self, partition: int, column: str, index: np.ndarray) -> Ragged:
        """Cells as views into the arena."""
        return self.arena.ragged(self.specs[column], *self.locate(partition, column, index))

    def release(self, partition: int, column: str, index: np.ndarray) -> None:
        """Frees cells; an index without a cell is skipped."""
        cells = self._table(partition, column)
        index = index[index < len(cells.offsets)]
        offsets, lengths = cells.offsets[index], cells.lengths[index]
        cells.offsets[index] = 0
        cells.lengths[index] = 0
        self.payload_bytes -= int(lengths.sum()) * cells.spec.itemsize
        self._drop(offsets, lengths, cells.spec)

    def _table(self, partition: int, column: str) -> Cells:
        key = (partition, column)
        if key not in self._cells:
            if column not in self.specs:
                raise DockError(f"unknown column {column!r}")
            self._cells[key] = Cells(self.specs[column])
        return self._cells[key]

    @staticmethod
    def _span(offsets: np.ndarray, lengths: np.ndarray, spec: ColumnSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        some = lengths > 0
        begin = offsets[some]
        end = begin + lengths[some] * spec.itemsize
        return begin // GRANULE, (end - 1) // GRANULE, some

    def _drop(self, offsets: np.ndarray, lengths: np.ndarray, spec: ColumnSpec) -> None:
        first, last, some = self._span(offsets, lengths, spec)
        if not some.any():
            return
        np.subtract.at(self._edges, first, 1)
        np.subtract.at(self._edges, last[last > first], 1)
        edges = np.unique(np.concatenate((first, last)))
        dead = edges[self._edges[edges] == 0]
        inner = last > first + 1
        self._free.give(np.concatenate((dead, first[inner] + 1)), np.concatenate((dead + 1, last[inner])))
