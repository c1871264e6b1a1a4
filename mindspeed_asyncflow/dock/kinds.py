"""From what a caller gives for a column to the cells that are stored, and back to the same kind.

`pack` checks everything before a byte moves: kind, dtype and shape are the declared ones or the call is refused with
the name of the column. Values are numpy arrays or anything that makes one through `__array__` (tensors of the CPU);
plain Python numbers take the declared dtype when they have its kind and range.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from mindspeed_asyncflow.dock.columns import NUMPY, ColumnSpec, Part
from mindspeed_asyncflow.dock.ragged import Ragged, copy_runs, runs
from mindspeed_asyncflow.errors import DockError

_INTEGER, _FLOAT = "iu", "f"
_LONG = 4096  # bytes: rows of this mean size are sent from where they are
_NO_BUFFER = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # dtypes that tensors do not hand out through `__array__`


class Packing:
    """The cells of one part on their way into the dock: flat, or still the caller's rows. Nothing is copied yet."""

    __slots__ = ("_flat", "_rows", "counts", "lengths", "nbytes", "part")

    def __init__(self, part: Part, lengths: np.ndarray, flat: Ragged | None, rows: list[np.ndarray] | None) -> None:
        self.part, self.lengths = part, lengths
        self._flat, self._rows = flat, rows
        self.counts = lengths * (part.itemsize // part.dtype.itemsize) if part.inner else lengths  # int64 [n], items
        self.nbytes = (len(lengths) if part.fixed else int(np.add.reduce(lengths))) * part.itemsize

    @property
    def items(self) -> int:
        """Of all cells."""
        return self.nbytes // self.part.dtype.itemsize

    @property
    def values(self) -> np.ndarray:
        """All cells after one another, [items] of the part's dtype."""
        if self._flat is not None:
            return self._flat.packed().values
        out = np.empty(self.items, self.part.dtype)
        self.copy_into(out, 0, len(self.lengths))
        return out

    def copy_into(self, out: np.ndarray, first: int, last: int) -> None:
        """Writes the cells first:last after one another into `out`, items of the part's dtype, which they fill."""
        if not len(out):
            return
        if self._flat is None:
            assert self._rows is not None
            np.concatenate(self._rows[first:last], out=out)
            return
        copy_runs(self._flat.values, *runs(self._flat.starts[first:last], self.counts[first:last]), out)

    def buffers(self, first: int, last: int) -> list[np.ndarray]:
        """The cells first:last as uint8 arrays, to be sent one after the other; few of them, copied only if small."""
        counts = self.counts[first:last]
        total = int(counts.sum())
        if self._flat is None:
            assert self._rows is not None
            rows = self._rows[first:last]
            if total * self.part.dtype.itemsize >= len(rows) * _LONG:
                return [np.ascontiguousarray(row).view(np.uint8) for row in rows if len(row)]
        else:
            begins, ends = runs(self._flat.starts[first:last], counts)
            if total * self.part.dtype.itemsize >= len(begins) * _LONG:
                flat = self._flat.values
                return [flat[b:e].view(np.uint8) for b, e in zip(begins.tolist(), ends.tolist())]
        out = np.empty(total, self.part.dtype)
        self.copy_into(out, first, last)
        return [out.view(np.uint8)]


def pack(spec: ColumnSpec, parts: tuple[Part, ...], values: Any) -> list[Packing]:
    """One Packing per part of the column. Raises DockError when kind, dtype, dimensions or shape are not declared."""
    if isinstance(values, (str, bytes)) or values is None:
        _refuse(spec, f"a sequence of rows is needed, got {type(values).__name__}")
    if spec.kind == "scalar":
        return [_pack_scalar(spec, parts[0], values)]
    if spec.kind == "ragged":
        return [_pack_ragged(spec, parts[0], values)]
    if spec.kind == "nested":
        return _pack_nested(spec, parts, values)
    wanted = str if spec.kind == "text" else (bytes, bytearray, memoryview)
    for row in values:
        if not isinstance(row, wanted):
            _refuse(spec, f"each row is {'a str' if spec.kind == 'text' else 'bytes'}, got {type(row).__name__}")
    try:
        raw = [np.frombuffer(row.encode() if isinstance(row, str) else bytes(row), np.uint8) for row in values]
    except UnicodeEncodeError as error:
        _refuse(spec, f"a row is no text: {error}")
    return [_scattered(parts[0], raw)]


def unpack(spec: ColumnSpec, cells: Sequence[Ragged]) -> Any:
    """The kind that was put: [n, *shape], Ragged, list of lists of arrays, list of str, list of bytes."""
    main = cells[0]
    if spec.kind == "ragged":
        return main
    if spec.kind == "scalar":
        if not spec.shape:
            return main.values[main.starts]  # tiny: always a copy
        return main.packed().values.reshape(len(main), *spec.shape)
    if spec.kind == "nested":
        return [np.split(row, np.cumsum(inner)[:-1]) if len(inner) else [] for row, inner in zip(main, cells[1])]
    if spec.kind == "text":
        return [row.tobytes().decode() for row in main]
    return [row.tobytes() for row in main]


def as_array(spec: ColumnSpec, value: Any) -> np.ndarray:
    """An array of the declared dtype. Arrays keep theirs or are refused; plain numbers are converted if they fit."""
    given = isinstance(value, np.ndarray) or hasattr(value, "__array__")
    try:
        array = _tensor_bits(value) if given else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        _refuse(spec, f"a value of type {type(value).__name__} is no array: {error}")
    target = NUMPY[spec.dtype]
    if array.dtype == target:
        return array
    if array.size == 0 and array.dtype.kind != "O":
        return array.astype(target)
    if given:
        _refuse(spec, f"got {array.dtype}; convert it first")
    kind = _FLOAT if spec.dtype in _NO_BUFFER else target.kind
    allowed = array.dtype.kind == kind or (kind in _INTEGER + _FLOAT and array.dtype.kind in _INTEGER)
    if not allowed:
        _refuse(spec, f"got {array.dtype} values")
    try:
        return np.asarray(value, target)
    except OverflowError as error:
        _refuse(spec, str(error))


def _tensor_bits(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    name = str(getattr(value, "dtype", "")).rpartition(".")[2]
    if name not in _NO_BUFFER or isinstance(getattr(value, "dtype", None), np.dtype):
        return np.asarray(value)
    home = sys.modules[type(value).__module__.partition(".")[0]]  # the library that made it has been imported by it
    width = getattr(home, f"uint{8 * NUMPY[name].itemsize}")
    return np.asarray(value.detach().contiguous().view(width)).view(NUMPY[name])


def _pack_scalar(spec: ColumnSpec, part: Part, values: Any) -> Packing:
    if isinstance(values, Ragged):
        _refuse(spec, "got rows of variable length")
    if isinstance(values, (list, tuple)) and any(hasattr(v, "__array__") and not np.isscalar(v) for v in values):
        rows = [as_array(spec, value) for value in values]
        for row in rows:
            if row.shape != spec.shape:
                _refuse(spec, f"got a row of shape {row.shape}")
        array = np.stack(rows)
    else:
        array = as_array(spec, values)
    if array.shape[1:] != spec.shape or not array.ndim:
        if array.size or array.ndim != 1:
            _refuse(spec, f"got {array.dtype} of shape {array.shape}")
        array = array.reshape(0, *spec.shape)
    n, items = len(array), part.itemsize // part.dtype.itemsize
    flat = np.ascontiguousarray(array).reshape(-1)
    ones = np.ones(n, np.int64)
    return Packing(part, ones, Ragged(flat, np.arange(n) * items, ones, spec.shape), None)


def _pack_ragged(spec: ColumnSpec, part: Part, values: Any) -> Packing:
    if isinstance(values, Ragged):
        if values.values.dtype != part.dtype or values.inner != spec.shape:
            _refuse(spec, f"got {values.values.dtype} elements of shape {values.inner}; convert it first")
        return Packing(part, values.lengths, values, None)
    if not isinstance(values, (list, tuple)) and hasattr(values, "__array__"):  # rows of equal length
        array = as_array(spec, values)
        if array.ndim != 2 + len(spec.shape) or array.shape[2:] != spec.shape:
            if array.size or array.ndim != 1:
                _refuse(spec, f"got an array of shape {array.shape} for [n, L{_dims(spec)}]")
            array = array.reshape(0, 0, *spec.shape)
        n, flat = len(array), np.ascontiguousarray(array).reshape(-1)
        lengths = np.full(n, array.shape[1], np.int64)
        return Packing(part, lengths, Ragged(flat, np.arange(n) * (flat.size // max(n, 1)), lengths, spec.shape), None)
    rows = values if isinstance(values, list) else list(values)
    return _scattered(part, _rows_of(spec, rows))


def _rows_of(spec: ColumnSpec, rows: list) -> list[np.ndarray]:
    """Each row as an array [L, *shape] of the declared dtype; nothing is done to those that are one already."""
    depth, target = 1 + len(spec.shape), NUMPY[spec.dtype]
    arrays = {type(row) for row in rows} <= {np.ndarray}
    plain = arrays and {(row.dtype, row.ndim) for row in rows} <= {(target, depth)}
    if plain and (not spec.shape or {row.shape[1:] for row in rows} <= {spec.shape}):
        return rows
    out = []
    for row in rows:
        if isinstance(row, (str, bytes)) or row is None:
            _refuse(spec, f"a row is an array or a list of numbers, got {type(row).__name__}")
        array = as_array(spec, row)
        if array.shape[1:] != spec.shape or array.ndim != depth:
            if array.size or array.ndim != 1:
                _refuse(spec, f"a row has one dimension{' more than its elements' if spec.shape else ''}, "
                              f"[L{_dims(spec)}], got shape {array.shape}")  # fmt: skip
            array = array.reshape(0, *spec.shape)
        out.append(array)
    return out


def _pack_nested(spec: ColumnSpec, parts: tuple[Part, ...], values: Any) -> list[Packing]:
    if isinstance(values, Ragged) or (isinstance(values, np.ndarray) and values.ndim < 2):
        _refuse(spec, "each row is a list of arrays")
    inner_rows = []
    for row in values:
        if not isinstance(row, (list, tuple)):
            _refuse(spec, f"each row is a list of arrays, got {type(row).__name__}")
        inner_rows.append(_rows_of(spec, list(row)))
    counts = np.fromiter(map(len, inner_rows), np.int64, len(inner_rows))
    flat = [array for row in inner_rows for array in row]
    inner = np.fromiter(map(len, flat), np.int64, len(flat))
    sums = np.concatenate(([0], np.cumsum(inner)))
    starts = np.cumsum(counts) - counts
    main = np.concatenate(flat) if flat else np.empty(0, parts[0].dtype)
    lengths = sums[starts + counts] - sums[starts]
    return [
        Packing(parts[0], lengths, Ragged(main, np.cumsum(lengths) - lengths, lengths), None),
        Packing(parts[1], counts, Ragged(inner, starts, counts), None),
    ]


def _scattered(part: Part, rows: list[np.ndarray]) -> Packing:
    if part.inner:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return Packing(part, lengths, None, [np.ascontiguousarray(row).reshape(-1) for row in rows])
    return Packing(part, np.fromiter(map(len, rows), np.int64, len(rows)), None, rows)


def _dims(spec: ColumnSpec) -> str:
    return "".join(f", {n}" for n in spec.shape)


def _refuse(spec: ColumnSpec, why: str) -> NoReturn:
    element = spec.dtype + (f" of shape {spec.shape}" if spec.shape else "")
    what = {
        "scalar": f"holds one {element} per row", "ragged": f"holds rows of {element}",
        "nested": f"holds lists of {spec.dtype} arrays", "text": "holds text", "bytes": "holds bytes",
    }[spec.kind]  # fmt: skip
    raise DockError(f"column {spec.name!r} {what}: {why}")
