"""The data plane of one node: the map from cells (row or group, part of a column) to bytes of the arena.

Space is handed out in granules of 64 bytes. A write packs the cells of each part back to back, as one piece, and all
pieces into one extent where one is free; otherwise each piece, or each block of its rows, gets an extent of its own.
So a cell has no padding and starts anywhere. A granule is free again when the last cell that touches it is released:
interior granules belong to one cell, and only the first and last granule of a cell can be shared, so a reference
count is kept for these alone. The work of a release depends on the cells released, not on bytes or on the rows alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_asyncflow.dock.arena import GRANULE, Arena
from mindspeed_asyncflow.dock.columns import ColumnSpec, Part
from mindspeed_asyncflow.dock.freelist import FreeList
from mindspeed_asyncflow.dock.ragged import Ragged
from mindspeed_asyncflow.errors import DockError, DockFull

_ONE = np.uint8(1)  # of the type of the counts: another type is ten times slower
_total = np.add.reduce  # the method of arrays costs twice as much
Piece = tuple[int, int, int, int]  # place of the part in its call, first row, end row, byte offset; rows lie packed


def check_fits(nbytes: int, most: int) -> None:
    """Raises DockFull for values that can never be stored at once."""
    if nbytes > most:
        raise DockFull(
            f"{nbytes} bytes at once can never fit: the arena takes at most {most} from one call of this kind; "
            "raise dock.arena_mb or send fewer rows"
        )


def granules(nbytes: int) -> int:
    return -(-nbytes // GRANULE)


def sizes_of(parts: Sequence[Part], lengths: Sequence[np.ndarray]) -> list[int]:
    """Bytes of cells of these lengths (elements), by part."""
    return [(len(n) if part.fixed else int(_total(n))) * part.itemsize for part, n in zip(parts, lengths)]


def room_for(nbytes: Sequence[int]) -> int:
    """What parts of these sizes take in the arena: each is rounded up to whole granules."""
    return sum(map(granules, nbytes)) * GRANULE


def lay_out(offset: int, rows: Sequence[int], sizes: Sequence[int]) -> list[Piece]:
    """A piece per part, one after the other from byte `offset`; `sizes` in granules."""
    pieces = []
    for i, (count, size) in enumerate(zip(rows, sizes)):
        pieces.append((i, 0, count, offset))
        offset += size * GRANULE
    return pieces


class Placed(NamedTuple):
    """Cells of one part that are to be."""

    name: str
    slots: np.ndarray  # of rows or groups
    offsets: np.ndarray  # bytes
    lengths: np.ndarray  # elements
    keep: np.ndarray | None = None  # bool; None: all


class Cells:
    """Byte offset and length in elements of one part's cells, by slot (or by group slot for a shared column)."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.offsets = np.zeros(0, np.int64)
        self.lengths = np.zeros(0, np.int64)

    def ensure(self, capacity: int) -> None:
        if capacity > len(self.offsets):
            grow = np.zeros(max(capacity, 2 * len(self.offsets), 256) - len(self.offsets), np.int64)
            self.offsets = np.concatenate((self.offsets, grow))
            self.lengths = np.concatenate((self.lengths, grow))


class Warehouse:
    """Bytes of one node. A cell is (partition number, part, index); who may use it is the controller's business."""

    def __init__(self, columns: Sequence[ColumnSpec], arena: Arena) -> None:
        self.parts = {part.name: part for column in columns for part in column.parts}
        self.arena = arena
        self._granules = len(arena.bytes) // GRANULE
        self._free = FreeList(1, self._granules)
        self._edges = np.zeros(self._granules, np.uint8)  # cells that begin or end in a granule, at most 64
        self.cells: dict[tuple[int, str], Cells] = {}
        self.capacity_bytes = (self._granules - 1) * GRANULE
        self.payload_bytes = 0  # of live cells
        self.peak_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self._free.total * GRANULE

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self._free.total * GRANULE

    # -- extents ---------------------------------------------------------------------------------------------------

    def stretch(self, nbytes: int) -> int | None:
        """Byte offset of one free run of `nbytes`, taken; None when there is none."""
        start = self._free.take(granules(nbytes))
        if start is None:
            return None
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return start * GRANULE

    def reserve(
        self, parts: Sequence[Part], lengths: Sequence[np.ndarray], nbytes: Sequence[int] | None = None
    ) -> list[Piece] | None:  # fmt: skip
        """Room for one call: a piece per part, or several; None when it is not there now. `nbytes`: by part."""
        sizes = [granules(each) for each in (sizes_of(parts, lengths) if nbytes is None else nbytes)]
        total = sum(sizes)
        if total > self._free.total:
            return None
        start = self._free.take(total) if total else 1
        if start is None:
            return self._reserve_apart(parts, lengths, sizes)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return lay_out(start * GRANULE, [len(n) for n in lengths], sizes)

    def _reserve_apart(
        self, parts: Sequence[Part], lengths: Sequence[np.ndarray], sizes: Sequence[int]
    ) -> list[Piece] | None:
        pieces: list[Piece] = []
        for i, (part, size) in enumerate(zip(parts, sizes)):
            start = self._free.take(size) if size else 1
            found = self._reserve_blocks(i, part, lengths[i]) if start is None else [
                (i, 0, len(lengths[i]), start * GRANULE)
            ]  # fmt: skip
            pieces += found
            if start is None and not found:
                self.cancel(pieces, parts, lengths)
                return None
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return pieces

    def _reserve_blocks(self, i: int, part: Part, lengths: np.ndarray) -> list[Piece]:
        """Blocks of rows, each as long as the longest free run allows; empty when one row fits nowhere."""
        ends = np.cumsum(lengths) * part.itemsize
        pieces: list[Piece] = []
        first, begin = 0, 0
        while first < len(lengths):
            longest = self._free.largest
            last = int(np.searchsorted(ends, begin + longest * GRANULE, "right"))
            start = self._free.take(granules(int(ends[last - 1]) - begin)) if last > first else None
            if start is None:
                self.cancel(pieces, [part] * (i + 1), [lengths] * (i + 1))
                return []
            pieces.append((i, first, last, start * GRANULE))
            first, begin = last, int(ends[last - 1])
        return pieces

    def cancel(self, pieces: Sequence[Piece], parts: Sequence[Part], lengths: Sequence[np.ndarray]) -> None:
        """Returns reserved pieces that no cell was placed in."""
        starts = np.array([offset // GRANULE for *_, offset in pieces], np.int64)
        sizes = [granules(int(lengths[i][first:last].sum()) * parts[i].itemsize) for i, first, last, _ in pieces]
        ends = starts + np.array(sizes, np.int64)
        self._free.give(starts[ends > starts], ends[ends > starts])

    # -- cells -----------------------------------------------------------------------------------------------------

    def place(self, partition: int, placed: Sequence[Placed]) -> None:
        """Makes reserved bytes the cells of rows; those that are not kept are given back."""
        sizes = [p.lengths * self.parts[p.name].itemsize for p in placed]
        joined = _joined(sizes)
        first, last = _span(_joined([p.offsets for p in placed]), joined)
        np.add.at(self._edges, first, _ONE)
        np.add.at(self._edges, last[last > first], _ONE)
        filled = len(first) == len(joined)  # no cell is empty: all that follows is plain
        looked_at, end = None, 0
        for (name, index, offsets, lengths, keep), nbytes in zip(placed, sizes):
            if not filled or (keep is not None and not keep.all()):
                if keep is not None:
                    self._drop(offsets[~keep], nbytes[~keep])
                    index, offsets, lengths = index[keep], offsets[keep], lengths[keep]
                self.adopt(partition, name, index, offsets, lengths)
                continue
            if index is not looked_at:  # most parts are of the same rows
                looked_at, end = index, _end(index)
            cells = self._table(partition, name)
            cells.ensure(end)
            cells.offsets[index] = offsets
            cells.lengths[index] = lengths
            self.payload_bytes += int(_total(nbytes))

    def adopt(self, partition: int, name: str, index: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        """Notes where cells are, and nothing else: see `rebuild`."""
        cells = self._table(partition, name)
        cells.ensure(_end(index))
        cells.offsets[index] = np.where(lengths > 0, offsets, 0)
        cells.lengths[index] = lengths
        self.payload_bytes += int(lengths.sum()) * cells.part.itemsize

    def rebuild(self, reserved: Sequence[np.ndarray] = ()) -> None:
        """Works out what is free from the cells that are there. For a restart, after all cells were adopted.

        `reserved`: begins and ends in bytes, int64 [n, 2] each, of pieces that nothing was placed in yet.
        """
        self.payload_bytes = 0
        self._edges[:] = 0
        change = np.zeros(self._granules + 1, np.int32)  # +1 where use begins, -1 where it ends
        change[0], change[1] = 1, -1
        for cells in self.cells.values():
            some = cells.lengths > 0
            first, last = _span(cells.offsets[some], cells.lengths[some] * cells.part.itemsize)
            np.add.at(self._edges, first, _ONE)
            np.add.at(self._edges, last[last > first], _ONE)
            np.add.at(change, first, 1)
            np.add.at(change, last + 1, -1)
            self.payload_bytes += int(cells.lengths.sum()) * cells.part.itemsize
        for spans in reserved:
            np.add.at(change, spans[:, 0] // GRANULE, 1)
            np.add.at(change, -(-spans[:, 1] // GRANULE), -1)
        used = np.concatenate(([True], np.cumsum(change[:-1]) > 0, [True]))
        starts = np.flatnonzero(used[:-1] & ~used[1:])
        ends = np.flatnonzero(~used[:-1] & used[1:])
        self._free = FreeList(0, 0)
        self._free.give(starts, ends)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give(self, spans: np.ndarray) -> None:
        """Frees what `rebuild` was told to keep: begins and ends in bytes, int64 [n, 2]."""
        starts, ends = spans[:, 0] // GRANULE, -(-spans[:, 1] // GRANULE)
        self._free.give(starts[ends > starts], ends[ends > starts])

    def locate(self, partition: int, name: str, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Byte offsets and lengths (elements) of cells that were placed, or that are renewable: then possibly empty."""
        cells = self._table(partition, name)
        if cells.part.renewable:
            cells.ensure(_end(index))
        return cells.offsets[index], cells.lengths[index]

    def bytes_by_column(self) -> dict[str, int]:
        """Bytes of live cells. Looks at all of them."""
        found: dict[str, int] = {}
        for cells in self.cells.values():
            nbytes = int(cells.lengths.sum()) * cells.part.itemsize
            found[cells.part.column] = found.get(cells.part.column, 0) + nbytes
        return found

    def read(self, partition: int, name: str, index: np.ndarray) -> Ragged:
        """Cells as views into the arena."""
        return self.arena.ragged(self.parts[name], *self.locate(partition, name, index))

    def release(self, partition: int, indexes: Mapping[str, np.ndarray]) -> None:
        """Frees cells by part; an index without a cell is skipped."""
        offsets, sizes = [], []
        looked_at, end = None, 0
        for name, index in indexes.items():
            cells = self.cells.get((partition, name))
            if cells is None or not len(index):
                continue
            if index is not looked_at:
                looked_at, end = index, _end(index)
            if end > len(cells.offsets):
                index = index[index < len(cells.offsets)]
            nbytes = cells.lengths[index] * cells.part.itemsize
            offsets.append(cells.offsets[index])
            sizes.append(nbytes)
            cells.offsets[index] = 0
            cells.lengths[index] = 0
        if sizes:
            joined = _joined(sizes)
            self.payload_bytes -= int(_total(joined))
            self._drop(_joined(offsets), joined)

    def release_rows(self, partition: int, slots: np.ndarray, groups: np.ndarray) -> None:
        """Frees all cells of rows, and the shared ones of groups."""
        self.release(partition, {p.name: groups if p.shared else slots for p in self.parts.values()})

    def _table(self, partition: int, name: str) -> Cells:
        key = (partition, name)
        found = self.cells.get(key)
        if found is None:
            if name not in self.parts:
                raise DockError(f"unknown column {name!r}")
            found = self.cells[key] = Cells(self.parts[name])
        return found

    def _drop(self, offsets: np.ndarray, sizes: np.ndarray) -> None:
        """Cells of `sizes` bytes leave: granules that nobody else touches are free."""
        first, last = _span(offsets, sizes)
        if not len(first):
            return
        np.subtract.at(self._edges, first, _ONE)
        np.subtract.at(self._edges, last[last > first], _ONE)
        edges = np.concatenate((first, last))
        dead = np.sort(edges[self._edges[edges] == 0])
        if len(dead) > 1:  # each once
            dead = dead[np.concatenate(([True], dead[1:] != dead[:-1]))]
        inner = last > first + 1
        self._free.give(np.concatenate((dead, first[inner] + 1)), np.concatenate((dead + 1, last[inner])))


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _span(offsets: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last granule of each cell that has bytes."""
    if np.count_nonzero(sizes) != len(sizes):
        some = sizes > 0
        offsets, sizes = offsets[some], sizes[some]
    return offsets // GRANULE, (offsets + (sizes - 1)) // GRANULE


def cell_offsets(pieces: Sequence[Piece], parts: Sequence[Part], lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Byte offset of each cell of each part, int64 [n] each."""
    out: list[np.ndarray] = [np.empty(0, np.int64)] * len(parts)
    for i, first, last, offset in pieces:
        n = lengths[i]
        if first == 0 and last == len(n):
            out[i] = packed_offsets(n, parts[i], offset)
            continue
        if not len(out[i]):
            out[i] = np.empty(len(n), np.int64)
        out[i][first:last] = packed_offsets(n[first:last], parts[i], offset)
    return out


def packed_offsets(lengths: np.ndarray, part: Part, offset: int) -> np.ndarray:
    """Byte offsets of cells that lie back to back from `offset`."""
    if part.fixed:
        return np.arange(offset, offset + len(lengths) * part.itemsize, part.itemsize)
    ends = np.add.accumulate(lengths)
    ends -= lengths
    ends *= part.itemsize
    ends += offset
    return ends


def _end(index: np.ndarray) -> int:
    """One more than the largest entry; 0: there is none."""
    return int(np.maximum.reduce(index)) + 1 if len(index) else 0
