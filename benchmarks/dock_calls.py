"""Every call of the dock that dock.py makes, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from dock_load import COLUMNS, DENSE, DENSE_WIDTH, JAGGED, MB, PROMPT, Batch

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import ColumnSpec, Ragged, TaskSpec
from mindspeed_asyncflow.dock.server import DockServer

SECRET = "of one benchmark"
META, LATE = "meta", "late"  # kinds beside those of dock_load: three numbers a row; a jagged row and when it was sent
TASKS = 4  # of META, each reads all three columns
META_COLUMNS = ("a", "b", "c")
WAIT_S = 60.0
ROOM = 2.2  # arena over payload: clients hold room ahead for their next put while half of the arena is free

_JAGGED_COLUMNS = (
    ColumnSpec("prompt", "int64", shape=(PROMPT,)),
    ColumnSpec("response", "int64", "ragged", tokens=True),
    ColumnSpec("logp", "float32", "ragged"),
)
_SCHEMAS = {
    JAGGED: (_JAGGED_COLUMNS, (TaskSpec("use", COLUMNS[JAGGED]),)),
    DENSE: (
        tuple(ColumnSpec(name, "float32", shape=(DENSE_WIDTH,)) for name in COLUMNS[DENSE]),
        (TaskSpec("use", COLUMNS[DENSE]),),
    ),
    LATE: ((*_JAGGED_COLUMNS, ColumnSpec("sent", "float64")), (TaskSpec("use", (*COLUMNS[JAGGED], "sent")),)),
    META: (
        tuple(ColumnSpec(name, "int64") for name in META_COLUMNS),
        tuple(TaskSpec(f"task{i}", META_COLUMNS) for i in range(TASKS)),
    ),
}


@dataclass(frozen=True, slots=True)
class Taken:
    claim_id: int
    rows: np.ndarray  # int64 [n], handles
    values: dict[str, Ragged | np.ndarray]

    def touch(self) -> None:
        """One element of every row of every column is read."""
        for values in self.values.values():
            if isinstance(values, Ragged):
                values.values[values.starts].sum()
            else:
                values.reshape(len(values), -1)[:, 0].sum()

    def copies(self) -> dict[str, np.ndarray]:
        """The values in memory of this process, row after row."""
        return {
            name: (values.stacked if isinstance(values, Ragged) else values).copy()
            for name, values in self.values.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.values.values())


def serve(kind: str, payload_bytes: int, host: str, pair: int) -> DockServer:
    """`pair`: which of several this one is, from 0."""
    columns, tasks = _SCHEMAS[kind]
    arena_mb = int(payload_bytes * ROOM) // MB + 8
    return DockServer(columns, tasks, arena_mb=arena_mb, lease_s=600.0, host=host, secret=SECRET, pair=pair)


def connect(addresses: Sequence[str], mapped: bool, home: int = 0) -> DockClient:
    """`home`: which of the addresses is the caller's own pair."""
    return DockClient(addresses, SECRET, wait_s=WAIT_S, map_arena=mapped, home=home)


def put(client: DockClient, partition: str, batch: Batch, sent: float | None = None) -> np.ndarray:
    """Returns the handles, int64 [n]. The values are handed over as they are; `sent` goes along (LATE)."""
    values: dict[str, Ragged | np.ndarray] = dict(batch.fixed)
    values |= {name: Ragged.from_flat(column, batch.offsets) for name, column in batch.flat.items()}
    if sent is not None:
        values["sent"] = np.full(batch.rows, sent)
    return put_values(client, partition, values)


def put_values(client: DockClient, partition: str, values: Mapping[str, Ragged | np.ndarray]) -> np.ndarray:
    """Each row is a prompt group of its own."""
    return np.concatenate(client.put(partition, values=values))


def take(client: DockClient, partition: str, count: int, columns: Sequence[str], worker: str, least: int) -> Taken:
    """Waits until `least` rows are ready; at most `count`. None at all: the partition is sealed and at its end."""
    claim = client.claim("use", count, partition=partition, worker=worker, at_least=least, columns=columns)
    return Taken(claim.claim_id, claim.rows, claim.values or {})


def grant(client: DockClient, partition: str, task: str, count: int) -> int:
    """A claim without values, as an answer of how many rows it gave."""
    return len(client.claim(task, count, partition=partition, worker=task, timeout_s=0.0))


def finish(client: DockClient, taken: Taken) -> None:
    client.done(taken.claim_id)


def clear(client: DockClient, rows: np.ndarray) -> None:
    client.free(rows)


def used_bytes(client: DockClient) -> int:
    """Bytes of the arena that are not free."""
    return client.stats()["used_bytes"]
