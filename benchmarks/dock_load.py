"""The workload of dock.py: the same bytes on both sides. numpy only, as it is loaded in both environments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MB = 1 << 20
PROMPT, SHORTEST, LONGEST = 512, 1024, 4096  # elements of a row's prompt and response
MEAN_ROW_BYTES = 34_900
POOL_BYTES = 256 * MB  # most that is made; larger payloads send the same batches again
DENSE_ROWS, DENSE_COLUMNS, DENSE_WIDTH = 1024, 4, 8192  # float32: 32 KiB a row and column
JAGGED, DENSE = "jagged", "dense"
COLUMNS = {JAGGED: ("prompt", "response", "logp"), DENSE: tuple(f"f{i}" for i in range(DENSE_COLUMNS))}


@dataclass(frozen=True, slots=True)
class Batch:
    """Columns of n rows: `fixed` ones [n, width], `flat` ones [T] with row i at offsets[i] to offsets[i + 1]."""

    rows: int
    fixed: dict[str, np.ndarray]
    flat: dict[str, np.ndarray]
    offsets: np.ndarray  # int64 [n + 1]

    @property
    def nbytes(self) -> int:
        """Of the values; offsets are not payload."""
        return sum(v.nbytes for v in (*self.fixed.values(), *self.flat.values()))

    def buffers(self) -> list[np.ndarray]:
        """All columns and the offsets as bytes [*], for yardsticks that know nothing of rows."""
        columns = [*self.fixed.values(), *self.flat.values(), self.offsets]
        return [column.reshape(-1).view(np.uint8) for column in columns]

    def digest(self) -> int:
        return sum(digest(v) for v in (*self.fixed.values(), *self.flat.values()))


@dataclass(frozen=True, slots=True)
class Plan:
    pool: list[Batch]
    puts: int  # put i sends pool[i % len(pool)]
    rows: int  # of each put
    nbytes: int  # of all puts

    def batch(self, i: int) -> Batch:
        return self.pool[i % len(self.pool)]

    @property
    def some(self) -> range:
        """The puts of the warm-up, whose values are compared in full."""
        return range(min(2, self.puts))


def digest(values: np.ndarray) -> int:
    """Sum of the words: independent of the order of the rows, changed by any lost or altered value."""
    return int(values.reshape(-1).view(np.uint32).sum(dtype=np.uint64))


def put_rows(mb: int, rows: int) -> int:
    """Rows of one put: a small payload may have fewer than `rows` altogether."""
    return min(rows, max(1, mb * MB // MEAN_ROW_BYTES))


def make_plan(kind: str, mb: int, rows: int) -> Plan:
    """About `mb` MiB in puts of `rows` rows. Dense: one put of a fixed shape, `mb` and `rows` mean nothing."""
    rng = np.random.default_rng(7)
    if kind == DENSE:
        fixed = {name: rng.random((DENSE_ROWS, DENSE_WIDTH), np.float32) for name in COLUMNS[DENSE]}
        batch = Batch(DENSE_ROWS, fixed, {}, np.zeros(1, np.int64))
        return Plan([batch], 1, DENSE_ROWS, batch.nbytes)
    total = mb * MB
    rows = put_rows(mb, rows)
    pool: list[Batch] = []
    while sum(batch.nbytes for batch in pool) < min(total, POOL_BYTES):
        pool.append(_jagged(rng, rows))
    puts = nbytes = 0
    while nbytes + pool[puts % len(pool)].nbytes // 2 < total:
        nbytes += pool[puts % len(pool)].nbytes
        puts += 1
    return Plan(pool, puts, rows, nbytes)


def one_row() -> Batch:
    return _jagged(np.random.default_rng(3), 1)


def _jagged(rng: np.random.Generator, rows: int) -> Batch:
    offsets = np.concatenate(([0], np.cumsum(rng.integers(SHORTEST, LONGEST, rows, endpoint=True))))
    return Batch(
        rows,
        {"prompt": rng.integers(0, 1 << 17, (rows, PROMPT))},
        {
            "response": rng.integers(0, 1 << 17, offsets[-1]),
            "logp": rng.random(offsets[-1], np.float32),
        },
        offsets,
    )
