"""Rows of variable length as flat values and where each row lies in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mindspeed_asyncflow.errors import DockError

_TINY_RUN = 512  # bytes: below it one indexed copy beats a copy per run


class Ragged:
    """n rows of variable length: row i is `lengths[i]` elements from item `starts[i]` of the flat `values`.

    An element is one item, or, with an `inner` shape, a block of prod(inner) items: row i is then [L, *inner].
    The rows may lie anywhere in `values` (in the arena they do), so selecting and reordering rows copies nothing.
    `packed()` gives flat values + offsets, contiguous.
    """

    __slots__ = ("inner", "lengths", "starts", "values")

    def __init__(
        self, values: np.ndarray, starts: np.ndarray, lengths: np.ndarray, inner: tuple[int, ...] = ()
    ) -> None:
        self.values = values  # [>= T], items
        self.starts = starts  # int64 [n], items
        self.lengths = lengths  # int64 [n], elements
        self.inner = inner

    @classmethod
    def from_flat(cls, values: np.ndarray, offsets: np.ndarray) -> Ragged:
        """`values` [T, *inner] and `offsets` int64 [n+1], offsets[0] = 0, offsets[n] = T."""
        offsets, inner = np.asarray(offsets, np.int64), values.shape[1:]
        return cls(values.reshape(-1), offsets[:-1] * _product(inner), np.diff(offsets), inner)

    @classmethod
    def from_rows(cls, rows: Sequence, dtype: str) -> Ragged:
        """Packs 1-D arrays or lists. An array of another dtype is refused, a list is converted."""
        arrays = [_as_row(row, dtype) for row in rows]
        lengths = np.fromiter((len(a) for a in arrays), np.int64, len(arrays))
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return cls(values, np.cumsum(lengths) - lengths, lengths)

    @classmethod
    def from_text(cls, texts: Iterable[str]) -> Ragged:
        return cls.from_rows([np.frombuffer(text.encode(), np.uint8) for text in texts], "uint8")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        start = self.starts[i]
        if self.inner:
            return self.values[start : start + self.lengths[i] * _product(self.inner)].reshape(-1, *self.inner)
        return self.values[start : start + self.lengths[i]]

    def __iter__(self) -> Iterator[np.ndarray]:
        for start, count in zip(self.starts.tolist(), self.counts.tolist()):
            row = self.values[start : start + count]
            yield row.reshape(-1, *self.inner) if self.inner else row

    def text(self, i: int) -> str:
        return self[i].tobytes().decode()

    def take(self, index: np.ndarray | Sequence[int]) -> Ragged:
        """The rows `index`, in that order; copies no value."""
        return Ragged(self.values, self.starts[index], self.lengths[index], self.inner)

    @property
    def counts(self) -> np.ndarray:
        """Length of each row in items; int64 [n]."""
        return self.lengths * _product(self.inner) if self.inner else self.lengths

    @property
    def offsets(self) -> np.ndarray:
        """int64 [n+1]: where each row begins once packed, in elements."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @property
    def nbytes(self) -> int:
        return int(self.counts.sum()) * self.values.dtype.itemsize

    @property
    def stacked(self) -> np.ndarray:
        """All rows after one another, [T, *inner]; copies only when they are not neighbours."""
        values = self.packed().values
        return values.reshape(-1, *self.inner) if self.inner else values

    def packed(self) -> Ragged:
        """The same rows back to back from 0. Copies only when they are not neighbours already."""
        counts = self.counts
        begins, ends = runs(self.starts, counts)
        packed_starts = np.add.accumulate(counts) - counts
        if len(begins) == 1:
            return Ragged(self.values[begins[0] : ends[0]], packed_starts, self.lengths, self.inner)
        values = np.empty(int(counts.sum()), self.values.dtype)
        copy_runs(self.values, begins, ends, values)
        return Ragged(values, packed_starts, self.lengths, self.inner)


def runs(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Begins and ends of the stretches [starts, starts + counts), in order; neighbours are one, empty ones none."""
    if np.count_nonzero(counts) != len(counts):
        some = counts > 0
        starts, counts = starts[some], counts[some]
    ends = starts + counts
    if len(starts) < 2:
        return starts, ends
    apart = starts[1:] != ends[:-1]
    return starts[np.concatenate(([True], apart))], ends[np.concatenate((apart, [True]))]


def copy_runs(source: np.ndarray, begins: np.ndarray, ends: np.ndarray, out: np.ndarray) -> None:
    """Copies source[begins[i] : ends[i]] one after the other into `out`, which they fill."""
    if len(begins) > 16 and out.nbytes < len(begins) * _TINY_RUN:
        sizes = ends - begins
        index = np.arange(len(out)) + np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
        np.take(source, index, out=out, mode="clip")  # "clip" writes without a second buffer; all are inside
        return
    at = 0
    for begin, end in zip(begins.tolist(), ends.tolist()):
        out[at : at + end - begin] = source[begin:end]
        at += end - begin


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _as_row(row, dtype: str) -> np.ndarray:
    if not isinstance(row, np.ndarray):
        return np.asarray(row, dtype)
    if row.ndim != 1:
        raise DockError(f"a ragged row has one dimension, got shape {row.shape}")
    if row.dtype != dtype:
        if row.size:
            raise DockError(f"a row of dtype {row.dtype} was given for a {dtype} column; convert it first")
        return row.astype(dtype)
    return row
