"""What the dock stores: typed columns, variable length without padding, and the tasks that read them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

from mindspeed_asyncflow.dock.ragged import Ragged
from mindspeed_asyncflow.errors import DockError

__all__ = ["DTYPES", "FINISH_CODES", "GRPO_COLUMNS", "ColumnSpec", "Part", "Ragged", "Schema", "TaskSpec", "grpo_tasks"]

DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
NUMPY = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES}
KINDS = ("scalar", "ragged", "nested", "text", "bytes")
MAX_COLUMNS = 63  # ready bits of a row are one int64
MAX_INNER = 1 << 24  # items of one element
_LAYOUTS = 256  # remembered
_INNER_LENGTHS = ":lengths"  # second part of a nested column: the lengths of a row's arrays

FINISH_CODES = {"stop": 0, "length": 1, "abort": 2, "error": 3}  # values of the column `finish`


@dataclass(frozen=True, slots=True)
class Part:
    """What the warehouse sees of a column: cells of `dtype` elements, each a block of the shape `inner`."""

    name: str
    column: str
    dtype: np.dtype
    inner: tuple[int, ...]
    itemsize: int  # bytes of one element
    fixed: bool  # one element per cell
    shared: bool
    tokens: bool
    renewable: bool = False


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column.

    `kind`: what a row is. "scalar": one element; "ragged": any number of elements; "nested": any number of 1-D arrays
    of any lengths; "text": a str; "bytes". An element is one `dtype` or, for scalar and ragged columns, an array of
    the inner `shape`. `shared`: one value per prompt group, given at the put; `tokens`: its lengths count as tokens.
    `renewable`: empty until it is written, and the holder of a claim on the row may write it again and again, as notes
    for whoever claims the row next; no task can wait for it.
    """

    name: str
    dtype: str  # one of DTYPES; "uint8" for text and bytes
    kind: Literal["scalar", "ragged", "nested", "text", "bytes"] = "scalar"
    shared: bool = False
    tokens: bool = False
    shape: tuple[int, ...] = ()
    renewable: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise DockError(f"column {self.name!r} has dtype {self.dtype!r}; one of {', '.join(DTYPES)} is possible")
        if self.kind not in KINDS:
            raise DockError(f"column {self.name!r} has kind {self.kind!r}; one of {', '.join(KINDS)} is possible")
        if self.kind in ("text", "bytes") and self.dtype != "uint8":
            raise DockError(f"column {self.name!r} of kind {self.kind!r} has dtype uint8, not {self.dtype}")
        if ":" in self.name or not self.name:
            raise DockError(f"column {self.name!r}: a name has at least one character and no ':'")
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if self.shape and self.kind not in ("scalar", "ragged"):
            raise DockError(f"column {self.name!r} of kind {self.kind!r} has no inner shape, got {self.shape}")
        if self.renewable and (self.shared or self.tokens or self.kind == "scalar"):
            raise DockError(f"column {self.name!r} is renewable: neither a scalar, nor shared, nor counted as tokens")
        if any(n < 1 for n in self.shape) or math.prod(self.shape) > MAX_INNER:
            raise DockError(f"column {self.name!r} has an impossible inner shape {self.shape}")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return NUMPY[self.dtype].itemsize * math.prod(self.shape)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is stored for the column: its values and, for a nested one, the inner lengths."""
        fixed = self.kind == "scalar"
        main = Part(
            self.name, self.name, NUMPY[self.dtype], self.shape, self.itemsize, fixed, self.shared, self.tokens,
            self.renewable,
        )  # fmt: skip
        if self.kind != "nested":
            return (main,)
        inner = replace(main, name=self.name + _INNER_LENGTHS, dtype=NUMPY["int64"], itemsize=8, tokens=False)
        return (main, inner)


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task is a name and the columns that it reads: a row is offered to it when exactly these are ready."""

    name: str
    columns: tuple[str, ...]


class Layout(NamedTuple):
    """What values of certain columns are made of."""

    parts: list[Part]  # in order
    mask: np.int64  # ready bits
    written: np.int64  # of these, the bits of columns that must be written before they are read
    shared: bool  # whether any column is


class Schema:
    """The columns and tasks of one dock, checked against each other, with one ready bit per column."""

    def __init__(self, columns: Sequence[ColumnSpec], tasks: Sequence[TaskSpec]) -> None:
        self.columns = {c.name: c for c in columns}
        self.tasks: dict[str, TaskSpec] = {}
        if len(self.columns) != len(columns) or len({t.name for t in tasks}) != len(tasks):
            raise DockError("two columns or two tasks of the dock have the same name")
        if len(columns) > MAX_COLUMNS:
            raise DockError(f"{len(columns)} columns are declared; a dock has at most {MAX_COLUMNS}")
        self.bit = {c.name: np.int64(1 << i) for i, c in enumerate(columns)}
        self.need: dict[str, np.int64] = {}  # columns that a task reads, as bits
        self.parts = {c.name: c.parts for c in columns}
        self._layouts: dict[tuple[str, ...], Layout] = {}  # calls name the same few columns again and again
        self._names: dict[int, tuple[str, ...]] = {}
        for task in tasks:
            self.add_task(task)

    def add_task(self, task: TaskSpec) -> None:
        notes = [name for name in task.columns if self.column(name).renewable]
        if notes:
            raise DockError(f"task {task.name!r} cannot wait for the renewable columns {', '.join(notes)}")
        self.need[task.name] = self.mask(task.columns)
        self.tasks[task.name] = task

    def mask(self, names: Iterable[str]) -> np.int64:
        bits = 0
        for name in names:
            bits |= int(self.bit[self.column(name).name])
        return np.int64(bits)

    def column(self, name: str) -> ColumnSpec:
        if name not in self.columns:
            raise DockError(f"unknown column {name!r}{nearest(name, self.columns)}")
        return self.columns[name]

    def layout(self, names: Sequence[str]) -> Layout:
        """Of these columns. Raises DockError for an unknown one."""
        key = tuple(names)
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            parts = [part for name in names for part in self.parts[self.column(name).name]]
            written = self.mask(name for name in names if not self.columns[name].renewable)
            shared = any(part.shared for part in parts)
            found = self._layouts[key] = Layout(parts, self.mask(names), written, shared)
        return found

    def names(self, mask: int) -> tuple[str, ...]:
        """The columns of these ready bits."""
        found = self._names.get(mask)
        if found is None:
            if len(self._names) >= _LAYOUTS:
                self._names.clear()
            found = self._names[mask] = tuple(name for name, bit in self.bit.items() if mask & int(bit))
        return found

    def task(self, name: str) -> TaskSpec:
        if name not in self.tasks:
            raise DockError(f"unknown task {name!r}{nearest(name, self.tasks)}")
        return self.tasks[name]


def column_table(schema: Schema) -> list[list]:
    """The columns as plain values, for other processes."""
    return [[c.name, c.dtype, c.kind, c.shared, c.tokens, list(c.shape), c.renewable] for c in schema.columns.values()]


def read_columns(table: Iterable[Sequence]) -> list[ColumnSpec]:
    """The columns of a `column_table`. Raises ValueError or TypeError when it is none."""
    return [ColumnSpec(n, d, k, s, t, tuple(shape), again) for n, d, k, s, t, shape, again in table]


def nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none yet'}"


GRPO_COLUMNS = (
    ColumnSpec("prompt_ids", "int32", "ragged", shared=True, tokens=True),  # [P]
    ColumnSpec("truth", "uint8", "ragged", shared=True),  # UTF-8 text
    ColumnSpec("fields", "uint8", "ragged", shared=True),  # UTF-8 text, a JSON object
    ColumnSpec("asked", "uint8", shared=True),  # 1; in service runs, of prompts that the run itself answers
    ColumnSpec("response_ids", "int32", "ragged", tokens=True),  # [L]
    ColumnSpec("rollout_logprobs", "float32", "ragged"),  # [L]
    ColumnSpec("finish", "uint8"),  # FINISH_CODES
    ColumnSpec("response_mask", "uint8", "ragged"),  # [L] 0: written by an environment; only with one
    ColumnSpec("score", "float32"),  # of the scorers
    ColumnSpec("reward", "float32"),  # with length and KL punishments
    ColumnSpec("advantage", "float32"),
    ColumnSpec("token_advantages", "float32", "ragged"),  # [L], in place of `advantage` where tokens differ
    ColumnSpec("values", "float32", "ragged"),  # [L] of the critic
    ColumnSpec("returns", "float32", "ragged"),  # [L]
    ColumnSpec("ref_logprobs", "float32", "ragged"),  # [L]
    ColumnSpec("response_spans", "int32", "ragged", shape=(3,)),  # [S, 3] version, start, end: tile [0, L)
    ColumnSpec("partial_ids", "int32", "ragged", renewable=True),  # [K] of an answer that is to be continued
    ColumnSpec("partial_logprobs", "float32", "ragged", renewable=True),  # [K]
    ColumnSpec("partial_spans", "int32", "ragged", shape=(3,), renewable=True),  # [S, 3] tile [0, K)
)


def grpo_tasks(
    with_reference: bool,
    *,
    kl_in_reward: bool = False,
    token_level: bool = False,
    critic: bool = False,
    service: bool = False,
) -> tuple[TaskSpec, ...]:
    """The tasks of a run.

    `with_reference` adds `reference`, and training waits for its log-probs; with `kl_in_reward` so does what makes
    rewards of scores. `token_level`: advantages are per token. `critic` adds `value`, which makes advantages of scores.
    `service`: some prompts come with their answers, and replicas are not offered these.
    """
    train: tuple[str, ...] = ("prompt_ids", "response_ids", "rollout_logprobs", "reward")
    reward: tuple[str, ...] = ("response_ids", "truth", "finish")
    value: tuple[str, ...] = ("prompt_ids", "response_ids", "reward")
    tasks = [TaskSpec("rollout", ("prompt_ids", "asked") if service else ("prompt_ids",))]
    if with_reference:
        tasks.append(TaskSpec("reference", ("prompt_ids", "response_ids")))
        train = (*train, "ref_logprobs")
    if kl_in_reward and critic:
        value = (*value, "rollout_logprobs", "ref_logprobs")
    elif kl_in_reward:
        reward = (*reward, "rollout_logprobs", "ref_logprobs")
    tasks.append(TaskSpec("reward", reward))
    if critic:
        tasks.append(TaskSpec("value", value))  # writes values and returns with the advantages that training waits for
    return (*tasks, TaskSpec("train", (*train, "token_advantages" if token_level else "advantage")))
