"""Values on their way into and out of the warehouse: reservations, puts and writes in place, cells located for readers.

A call's values are the cells of its parts, one part after the other. They reach their place in one of three ways: the
client maps the arena and copied them there, they follow the frame as bulk and are received there, or, when they are
few, they lie in the frame itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from mindspeed_asyncflow.dock.arena import GRANULE
from mindspeed_asyncflow.dock.columns import Part, Schema
from mindspeed_asyncflow.dock.partition import Partition
from mindspeed_asyncflow.dock.ragged import copy_runs, runs
from mindspeed_asyncflow.dock.warehouse import (
    Piece,
    Warehouse,
    cell_offsets,
    check_fits,
    granules,
    lay_out,
    room_for,
)
from mindspeed_asyncflow.dock.wire import Message, WireError
from mindspeed_asyncflow.errors import DockError, DockFull

PUT_SHARE = 0.75  # of the arena: what puts may fill; the rest is for results
AHEAD_SHARE = 0.5  # of the arena: up to here clients may hold room for their next call
_ALIGN = 8  # bytes: where each part begins in the values of an answer
_SMALL_RUN = 1024  # bytes: shorter stretches are gathered before they are sent
_MOST_GATHERED = 8 << 20  # bytes
_least, _most, _total = np.minimum.reduce, np.maximum.reduce, np.add.reduce  # methods of arrays cost twice as much


class NoRoom(Exception):
    """Internal: the call must wait until rows are freed. Raised before anything was changed."""

    def __init__(self, what: str) -> None:
        self.what = what


@dataclass(slots=True)
class Values:
    """The cells of one put or write, in place."""

    columns: list[str]
    parts: list[Part]
    lengths: list[np.ndarray]  # elements, int64 [rows] per part
    pieces: list[Piece]
    offsets: list[np.ndarray]  # bytes, int64 [rows] per part


@dataclass(slots=True)
class _Reservation:
    owner: object  # connection
    columns: list[str]
    parts: list[Part]
    lengths: list[np.ndarray]
    pieces: list[Piece]
    put: bool
    total: int
    stretch: tuple[int, int] | None = None  # byte offset and size: the client lays the parts out itself

    def spans(self) -> np.ndarray:
        """Begins and ends in bytes, int64 [n, 2]."""
        if self.stretch is not None:
            offset, nbytes = self.stretch
            return np.array([(offset, offset + nbytes)], np.int64)
        ends = [o + int(self.lengths[i][a:b].sum()) * self.parts[i].itemsize for i, a, b, o in self.pieces]
        return np.array([(piece[3], end) for piece, end in zip(self.pieces, ends)], np.int64).reshape(-1, 2)


@dataclass(slots=True)
class Outgoing:
    """Cells for a reader elsewhere: stretches of the arena, and small ones gathered; see `Store.stream`."""

    chunks: list[bytes | tuple[list[int], list[int]]]  # bytes, or begins and ends in the arena
    nbytes: int


class Store:
    def __init__(self, schema: Schema, warehouse: Warehouse, max_rows: int, first: int = 1) -> None:
        self.schema, self.warehouse, self.max_rows = schema, warehouse, max_rows
        self._reserved: dict[int, _Reservation] = {}
        self._numbers = itertools.count(first)
        self._most_ahead = int(warehouse.capacity_bytes * AHEAD_SHARE)
        self.journal: Callable[[str, dict], None] | None = None

    # -- room ------------------------------------------------------------------------------------------------------

    def check_rows(self, more: int, live: int) -> None:
        """Raises DockFull when so many rows can never be held, NoRoom when not now."""
        if self.max_rows and more > self.max_rows:
            raise DockFull(f"{more} rows at once can never be held: a pair takes {self.max_rows}; raise dock.max_rows")
        if self.max_rows and live + more > self.max_rows:
            raise NoRoom(f"room for {more} rows (dock.max_rows is {self.max_rows})")

    def reserve(self, message: Message, owner: object, columns: list[str], rows: int, shared_rows: int) -> dict:
        parts, lengths, sizes = self._lengths(message, columns, rows, shared_rows)
        put = message.flag("put")
        pieces = self._room(parts, lengths, sizes, put)
        number = next(self._numbers)
        total = sum(sizes)
        kept = self._reserved[number] = _Reservation(owner, columns, parts, lengths, pieces, put, total)
        if self.journal is not None:
            self.journal("reserve", {"number": number, "spans": kept.spans().reshape(-1)})
        return {"reservation": number, "pieces": np.array(pieces, np.int64).reshape(-1)}

    def reserve_stretch(self, nbytes: int, owner: object, put: bool) -> dict:
        """One stretch that the client fills and describes later; reservation 0: only several pieces would do."""
        if nbytes < 1:
            raise WireError(f"a reservation of {nbytes} bytes")
        most = int(self.warehouse.capacity_bytes * PUT_SHARE) if put else self.warehouse.capacity_bytes
        check_fits(nbytes, most)
        if nbytes > self.warehouse.free_bytes or (put and self.warehouse.used_bytes + nbytes > most):
            raise NoRoom(f"{nbytes} free bytes")
        return self._keep_stretch(nbytes, owner, put) or {"reservation": 0}

    def ahead(self, nbytes: int | None, owner: object, put: bool) -> dict:
        """A stretch for the next call of a client that may write as much again, while half of the arena is free."""
        if nbytes is None or not 1 <= nbytes <= self._most_ahead - self.warehouse.used_bytes:
            return {}
        return self._keep_stretch(nbytes, owner, put)

    def _keep_stretch(self, nbytes: int, owner: object, put: bool) -> dict:
        offset = self.warehouse.stretch(nbytes)
        if offset is None:
            return {}
        number = next(self._numbers)
        self._reserved[number] = _Reservation(owner, [], [], [], [], put, 0, (offset, nbytes))
        if self.journal is not None:
            self.journal("reserve", {"number": number, "spans": [offset, offset + nbytes]})
        return {"reservation": number, "offset": offset}

    def _room(
        self, parts: Sequence[Part], lengths: Sequence[np.ndarray], sizes: Sequence[int], put: bool
    ) -> list[Piece]:  # fmt: skip
        house = self.warehouse
        total = room_for(sizes)
        most = int(house.capacity_bytes * PUT_SHARE) if put else house.capacity_bytes
        check_fits(total, most)
        pieces = None if put and house.used_bytes + total > most else house.reserve(parts, lengths, sizes)
        if pieces is None:
            raise NoRoom(f"{total} free bytes")
        return pieces

    def cancel(self, number: int) -> None:
        """Gives back what was reserved and is not going to be used."""
        kept = self._reserved.pop(number, None)
        if kept is not None:
            self._unreserved(number)
            if kept.stretch is not None:
                self.warehouse.give(kept.spans())
            else:
                self.warehouse.cancel(kept.pieces, kept.parts, kept.lengths)

    def cancel_of(self, owner: object, number: object = None) -> bool:
        """As `cancel`, for one or all (None) reservations of a connection; whether there were any."""
        mine = [n for n, kept in self._reserved.items() if kept.owner is owner and number in (None, n)]
        for each in mine:
            self.cancel(each)
        return bool(mine)

    def reserved_spans(self) -> dict[int, np.ndarray]:
        """Begins and ends in bytes of what clients may be writing now, by reservation; int64 [2n] each."""
        return {number: kept.spans().reshape(-1) for number, kept in self._reserved.items()}

    @property
    def reserved_bytes(self) -> int:
        """Room that clients hold and have not filled yet."""
        every = (kept.spans() for kept in self._reserved.values())
        return sum(room_for((spans[:, 1] - spans[:, 0]).tolist()) for spans in every)

    def _unreserved(self, number: int) -> None:
        if self.journal is not None:
            self.journal("unreserve", {"number": number})

    def landing(self, owner: object, number: int, nbytes: int) -> list[memoryview]:
        """Where the bulk of a call goes. Raises WireError when it was not reserved by `owner` in this size."""
        kept = self._reserved.get(number)
        if kept is None or kept.owner is not owner or kept.total != nbytes:
            raise WireError(f"{nbytes} bytes of bulk were announced that were not reserved by their connection")
        views = []
        for i, first, last, offset in kept.pieces:
            size = int(kept.lengths[i][first:last].sum()) * kept.parts[i].itemsize
            if size:
                views.append(self.warehouse.arena.memory[offset : offset + size])
        return views

    # -- in --------------------------------------------------------------------------------------------------------

    def _lengths(
        self, message: Message, columns: list[str], rows: int, shared_rows: int
    ) -> tuple[list[Part], list[np.ndarray], list[int]]:
        """Parts, and lengths and bytes per part, of a put or write: checked against the schema and number of rows."""
        if len(set(columns)) != len(columns):
            raise DockError("a call names the same column twice")
        parts, given, at = self.schema.layout(columns).parts, message.ints("lengths"), 0
        found, sizes = [], []
        for part in parts:
            n = shared_rows if part.shared else rows
            if part.fixed:
                found.append(np.ones(n, np.int64))
                sizes.append(n * part.itemsize)
                continue
            lengths = given[at : at + n]
            at += n
            if len(lengths) != n:
                raise DockError(f"column {part.name!r} came with {len(lengths)} rows, expected {n}")
            if n and (_least(lengths) < 0 or _most(lengths) > self.warehouse.capacity_bytes):
                raise DockError(f"column {part.name!r} has a row of impossible length")
            found.append(lengths)
            sizes.append(int(_total(lengths)) * part.itemsize)
        if at != len(given):
            raise DockError(f"a call came with {len(given)} lengths, its columns and rows need {at}")
        return parts, found, sizes

    def fill(self, message: Message, owner: object, rows: int, shared_rows: int, put: bool) -> Values:
        """The values of a put or write, in place. The caller places or cancels them."""
        number = message.whole("reservation")
        if number:
            kept = self._reserved.get(number)
            if kept is None or kept.owner is not owner or (kept.put is not put and kept.stretch is None):
                raise DockError("the bytes of this call were not reserved by its connection")
            if kept.stretch is not None:
                return self._in_stretch(message, number, kept.stretch, rows, shared_rows)
            for part, lengths in zip(kept.parts, kept.lengths):
                if len(lengths) != (shared_rows if part.shared else rows):
                    raise DockError(f"column {part.name!r} was reserved for {len(lengths)} rows")
            del self._reserved[number]
            self._unreserved(number)
            return Values(kept.columns, kept.parts, kept.lengths, kept.pieces,
                          cell_offsets(kept.pieces, kept.parts, kept.lengths))  # fmt: skip
        columns = message.names("columns")
        parts, given, sizes = self._lengths(message, columns, rows, shared_rows)
        data = message.array("data", "uint8")
        if len(data) != sum(sizes):
            raise DockError(f"a call came with {len(data)} bytes of values, its lengths say otherwise")
        pieces = self._room(parts, given, sizes, put)
        at, arena = 0, self.warehouse.arena.bytes
        for i, first, last, offset in pieces:
            whole = last - first == len(given[i])
            size = sizes[i] if whole else int(given[i][first:last].sum()) * parts[i].itemsize
            arena[offset : offset + size] = data[at : at + size]
            at += size
        return Values(columns, parts, given, pieces, cell_offsets(pieces, parts, given))

    def _in_stretch(
        self, message: Message, number: int, stretch: tuple[int, int], rows: int, shared_rows: int
    ) -> Values:
        """Values that the client has laid out in its stretch; what it did not need is free again."""
        columns = message.names("columns")
        parts, lengths, filled = self._lengths(message, columns, rows, shared_rows)
        sizes = [granules(nbytes) for nbytes in filled]
        offset, nbytes = stretch
        end = offset + sum(sizes) * GRANULE
        if end > offset + nbytes:
            raise DockError(f"{end - offset} bytes of values came for {nbytes} that were reserved")
        del self._reserved[number]
        self._unreserved(number)
        if end < offset + nbytes:
            self.warehouse.give(np.array([(end, offset + nbytes)], np.int64))
        pieces = lay_out(offset, [len(n) for n in lengths], sizes)
        return Values(columns, parts, lengths, pieces, cell_offsets(pieces, parts, lengths))

    def give_up(self, values: Values) -> None:
        self.warehouse.cancel(values.pieces, values.parts, values.lengths)

    def tokens(self, values: Values, counts: np.ndarray | None, rows: int, fresh: dict[str, np.ndarray]) -> np.ndarray:
        """Elements that count as tokens, per row; `fresh`: which rows of a part count, where not all do."""
        total: np.ndarray | None = None
        for part, lengths in zip(values.parts, values.lengths):
            if part.tokens:
                lengths = lengths * fresh[part.name] if part.name in fresh else lengths
                lengths = np.repeat(lengths, counts) if part.shared and counts is not None else lengths
                total = lengths if total is None else total + lengths
        return np.zeros(rows, np.int64) if total is None else total

    def equal(self, partition: Partition, values: Values, i: int, index: np.ndarray, which: np.ndarray) -> bool:
        """Whether the cells `index` hold, to the bit, those of the new values of part i that `which` selects."""
        part = values.parts[i]
        old = self.warehouse.read(partition.number, part.name, index)
        new = self.warehouse.arena.ragged(part, values.offsets[i][which], values.lengths[i][which])
        same = np.array_equal(old.lengths, new.lengths)
        return same and old.packed().values.tobytes() == new.packed().values.tobytes()

    # -- out -------------------------------------------------------------------------------------------------------

    def locate(self, part: Partition, slots: np.ndarray, columns: Sequence[str]) -> np.ndarray:
        """int64 [2 * parts, rows]: byte offset and length in elements of each cell, part by part."""
        layout, ready = self.schema.layout(columns), part.rows.ready[slots]
        if np.count_nonzero(ready & layout.written == layout.written) != len(slots):
            self._refuse_unwritten(ready, columns)
        groups = part.rows.group[slots] if layout.shared else slots
        out = np.empty((2 * len(layout.parts), len(slots)), np.int64)
        for i, cell in enumerate(layout.parts):
            out[2 * i], out[2 * i + 1] = self.warehouse.locate(
                part.number, cell.name, groups if cell.shared else slots
            )  # fmt: skip
        return out

    def _refuse_unwritten(self, ready: np.ndarray, columns: Sequence[str]) -> NoReturn:
        must = [name for name in columns if not self.schema.columns[name].renewable]
        absent = {name: int(np.count_nonzero(ready & self.schema.bit[name] == 0)) for name in must}
        name = next(name for name in must if absent[name])
        raise DockError(f"column {name!r} of {absent[name]} of {len(ready)} rows is not written yet")

    def stream(self, columns: Sequence[str], cells: np.ndarray) -> Outgoing:
        """The cells part by part, each part padded to 8 bytes: what follows an answer as its bulk."""
        chunks: list[bytes | tuple[list[int], list[int]]] = []
        total = 0
        for i, part in enumerate(self.schema.layout(columns).parts):
            begins, ends = runs(cells[2 * i], cells[2 * i + 1] * part.itemsize)
            nbytes = int((ends - begins).sum())
            small = nbytes < len(begins) * _SMALL_RUN and nbytes <= _MOST_GATHERED
            if small or part.renewable:  # renewable bytes may be another cell's before they are sent
                copied = np.empty(nbytes + -nbytes % _ALIGN, np.uint8)
                copy_runs(self.warehouse.arena.bytes, begins, ends, copied[:nbytes])
                copied[nbytes:] = 0
                chunks.append(copied.tobytes())
            else:
                chunks.append((begins.tolist(), ends.tolist()))
                if nbytes % _ALIGN:
                    chunks.append(bytes(-nbytes % _ALIGN))
            total += nbytes + -nbytes % _ALIGN
        return Outgoing(chunks, total)
