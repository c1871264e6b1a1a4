"""What the dock stores: typed columns, variable length without padding, and the tasks that read them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindspeed_asyncflow.errors import DockError

DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
)  # fmt: skip
MAX_COLUMNS = 63  # ready bits of a row are one int64

FINISH_CODES = {"stop": 0, "length": 1, "abort": 2, "error": 3}  # values of the column `finish`


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column. `shared`: one value per prompt group, given at the put; `tokens`: its lengths count as tokens."""

    name: str
    dtype: str  # numpy name, one of DTYPES
    kind: Literal["scalar", "ragged"] = "scalar"
    shared: bool = False
    tokens: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise DockError(f"column {self.name!r} has dtype {self.dtype!r}; one of {', '.join(DTYPES)} is possible")
        if self.kind not in ("scalar", "ragged"):
            raise DockError(f"column {self.name!r} has kind {self.kind!r}; 'scalar' or 'ragged' is possible")

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task is a name and the columns that it reads: a row is offered to it when exactly these are ready."""

    name: str
    columns: tuple[str, ...]


class Ragged:
    """n rows of variable length: row i is `values[starts[i] : starts[i] + lengths[i]]`.

    The rows may lie anywhere in `values` (in the arena they do), so selecting and reordering rows copies nothing.
    `packed()` gives flat values + offsets, contiguous.
    """

    __slots__ = ("lengths", "starts", "values")

    def __init__(self, values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.values = values  # [>= T]
        self.starts = starts  # int64 [n], elements
        self.lengths = lengths  # int64 [n], elements

    @classmethod
    def from_flat(cls, values: np.ndarray, offsets: np.ndarray) -> Ragged:
        """`values` [T] and `offsets` int64 [n+1], offsets[0] = 0, offsets[n] = T."""
        offsets = np.asarray(offsets, np.int64)
        return cls(values, offsets[:-1], np.diff(offsets))

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
        return self.values[start : start + self.lengths[i]]

    def __iter__(self) -> Iterator[np.ndarray]:
        for start, length in zip(self.starts.tolist(), self.lengths.tolist()):
            yield self.values[start : start + length]

    def text(self, i: int) -> str:
        return self[i].tobytes().decode()

    def take(self, index: np.ndarray | Sequence[int]) -> Ragged:
        """The rows `index`, in that order; copies no value."""
        return Ragged(self.values, self.starts[index], self.lengths[index])

    @property
    def offsets(self) -> np.ndarray:
        """int64 [n+1]: where each row begins once packed."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum()) * self.values.dtype.itemsize

    def packed(self) -> Ragged:
        """The same rows back to back from 0. Copies only when they are not neighbours already."""
        ends = self.starts + self.lengths
        if len(self) and bool(np.all(self.starts[1:] == ends[:-1])):
            first = self.starts[0]
            return Ragged(self.values[first : ends[-1]], self.starts - first, self.lengths)
        values = np.concatenate(list(self)) if len(self) else self.values[:0]
        return Ragged(values, np.cumsum(self.lengths) - self.lengths, self.lengths)


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


class Schema:
    """The columns and tasks of one dock, checked against each other, with one ready bit per column."""

    def __init__(self, columns: Sequence[ColumnSpec], tasks: Sequence[TaskSpec]) -> None:
        self.columns = {c.name: c for c in columns}
        self.tasks = {t.name: t for t in tasks}
        if len(self.columns) != len(columns) or len(self.tasks) != len(tasks):
            raise DockError("two columns or two tasks of the dock have the same name")
        if len(columns) > MAX_COLUMNS:
            raise DockError(f"{len(columns)} columns are declared; a dock has at most {MAX_COLUMNS}")
        self.bit = {c.name: np.int64(1 << i) for i, c in enumerate(columns)}
        self.need = {t.name: self.mask(t.columns) for t in tasks}  # columns that a task reads, as bits

    def mask(self, names: Iterable[str]) -> np.int64:
        bits = 0
        for name in names:
            bits |= int(self.bit[self.column(name).name])
        return np.int64(bits)

    def column(self, name: str) -> ColumnSpec:
        if name not in self.columns:
            raise DockError(f"unknown column {name!r}{nearest(name, self.columns)}")
        return self.columns[name]

    def task(self, name: str) -> TaskSpec:
        if name not in self.tasks:
            raise DockError(f"unknown task {name!r}{nearest(name, self.tasks)}")
        return self.tasks[name]

    def coerce(self, name: str, values) -> Ragged:
        """`values` as a packed Ragged of the declared dtype; a scalar column is one element per row.

        Raises DockError when kind, dtype or number of dimensions is not the declared one.
        """
        spec = self.column(name)
        if spec.kind == "ragged":
            ragged = values if isinstance(values, Ragged) else Ragged.from_rows(values, spec.dtype)
            if ragged.values.dtype != spec.dtype:
                raise DockError(f"column {name!r} is {spec.dtype}, got {ragged.values.dtype}; convert it first")
            return ragged.packed()
        if isinstance(values, Ragged):
            raise DockError(f"column {name!r} holds one {spec.dtype} per row, got rows of variable length")
        array = values if isinstance(values, np.ndarray) else np.asarray(values, spec.dtype)
        if array.dtype != spec.dtype or array.ndim != 1:
            raise DockError(
                f"column {name!r} holds one {spec.dtype} per row, "
                f"got {array.dtype} of shape {array.shape}; convert it first"
            )
        return Ragged(np.ascontiguousarray(array), np.arange(len(array)), np.ones(len(array), np.int64))


def nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none yet'}"


GRPO_COLUMNS = (
    ColumnSpec("prompt_ids", "int32", "ragged", shared=True, tokens=True),  # [P]
    ColumnSpec("truth", "uint8", "ragged", shared=True),  # UTF-8 text
    ColumnSpec("response_ids", "int32", "ragged", tokens=True),  # [L]
    ColumnSpec("rollout_logprobs", "float32", "ragged"),  # [L]
    ColumnSpec("finish", "uint8"),  # FINISH_CODES
    ColumnSpec("reward", "float32"),
    ColumnSpec("advantage", "float32"),
    ColumnSpec("ref_logprobs", "float32", "ragged"),  # [L]
)


def grpo_tasks(with_reference: bool) -> tuple[TaskSpec, ...]:
    """The tasks of a GRPO run; `with_reference` adds `reference`, and training waits for its log-probs."""
    train: tuple[str, ...] = ("prompt_ids", "response_ids", "rollout_logprobs", "advantage", "reward")
    tasks = [TaskSpec("rollout", ("prompt_ids",)), TaskSpec("reward", ("response_ids", "truth", "finish"))]
    if with_reference:
        tasks.append(TaskSpec("reference", ("prompt_ids", "response_ids")))
        train = (*train, "ref_logprobs")
    return (*tasks, TaskSpec("train", train))
