"""What a pair's journal says of its state: one effect per change, and the whole state as effects.

Slots are rows of a partition; of shared columns the cells are named by group id, since group slots change at a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.controller import Controller
from mindspeed_asyncflow.dock.journal import Effect
from mindspeed_asyncflow.dock.partition import Partition
from mindspeed_asyncflow.dock.queue import CLAIMED, DONE, TaskQueue
from mindspeed_asyncflow.dock.store import Values
from mindspeed_asyncflow.dock.table import RowTable
from mindspeed_asyncflow.dock.warehouse import Warehouse


def put_effect(
    part: Partition, slots: np.ndarray, ready: np.int64 | int, tokens: np.ndarray, now: float,
    versions: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fields of the effect "put", beside those of `named_groups` or `anonymous_groups`."""
    span = {} if versions is None else {"version_min": versions[0], "version_max": versions[1]}
    return span | {
        "partition": part.name, "slots": slots, "generations": part.rows.generation[slots], "ready": int(ready),
        "tokens": tokens, "born": now,
    }  # fmt: skip


def named_groups(ids: np.ndarray, sizes: np.ndarray, counts: np.ndarray, members: np.ndarray) -> dict[str, Any]:
    return {"ids": ids, "sizes": sizes, "counts": counts, "members": members}


def anonymous_groups(ids: np.ndarray) -> dict[str, Any]:
    """Each row is a group of its own, and the ids go down by one from the first."""
    return {"first_id": int(ids[0])}


def write_effect(part: Partition, slots: np.ndarray, written: np.int64 | int) -> dict[str, Any]:
    """Fields of the effect "write"."""
    rows = part.rows
    return {
        "partition": part.name, "slots": slots, "written": int(written), "tokens": rows.tokens[slots],
        "version_min": rows.version_min[slots], "version_max": rows.version_max[slots],
    }  # fmt: skip


def cell_fields(
    part: Partition, values: Values, slots: np.ndarray, groups: np.ndarray | None, keep: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Where the cells of a put or write are; `keep`: which of a part were kept, where not all were.

    Cells of all rows that lie back to back need no more than where they begin, and, unless all are of one size, their
    lengths.
    """
    found: dict[str, Any] = {"parts": []}
    packed = len(values.pieces) == len(values.parts)
    for n, (cell, offsets, lengths) in enumerate(zip(values.parts, values.offsets, values.lengths)):
        if packed and cell.name not in keep and not cell.shared:
            found["parts"].append([cell.name, False])
            found[f"begin{n}"] = values.pieces[n][3]
            if not cell.fixed:
                found[f"lengths{n}"] = lengths
            continue
        index = part.groups.id[groups] if cell.shared and groups is not None else slots
        if cell.name in keep:
            kept = keep[cell.name]
            index, offsets, lengths = index[kept], offsets[kept], lengths[kept]
        _add_cells(found, cell.name, cell.shared, index, offsets, lengths)
    return found


def _add_cells(
    found: dict[str, Any], name: str, shared: bool, index: np.ndarray, offsets: np.ndarray, lengths: np.ndarray
) -> None:
    n = len(found["parts"])
    found["parts"].append([name, shared])
    found |= {f"index{n}": index, f"offsets{n}": offsets, f"lengths{n}": lengths}


def describe_state(control: Controller, house: Warehouse) -> Iterator[Effect]:
    """Effects that lead to the present state, without its claims."""
    for task in control.schema.tasks.values():
        yield "task", {"name": task.name, "columns": list(task.columns)}
    yield "numbers", dict(zip(("used", "free"), control.partition_numbers()))
    yield "drops", {"counts": dict(control.drops)}
    for claim_id in control.leases.spread_claims():
        yield "spread", {"claim": claim_id, "is_open": True}
    for part in control.partitions.values():
        yield from _describe_partition(part, house)


def _describe_partition(part: Partition, house: Warehouse) -> Iterator[Effect]:
    rows, table = part.rows, part.groups
    about = {"partition": part.name}
    yield "partition", about | {"number": part.number, "first": rows.first, "generation": rows.generation}
    groups = table.live()
    if len(groups):
        groups = groups[np.argsort(table.seq[groups])]
        slots, counts = table.members(groups)
        sizes = table.size[groups] + counts - table.alive[groups]  # rows on their way out are put, and leave below
        each = {"born_each": rows.born[slots], "seq_each": rows.seq[slots]}
        named = named_groups(table.id[groups], sizes, counts, rows.member[slots])
        yield "put", put_effect(part, slots, 0, rows.tokens[slots], 0.0) | named | each
        yield "cells", about | _all_cells(part, house, groups, slots)
        ready = rows.ready[slots]
        for mask in np.unique(ready).tolist():
            yield "write", write_effect(part, slots[ready == mask], mask)
        for task, queue in part.queues.items():
            yield "done", about | {"task": task, "slots": slots[queue.states(slots) == DONE]}
            yield "order", about | _order(queue, rows, slots) | {"task": task}
        doomed = slots[rows.doomed[slots]]
        yield "leave", about | {"slots": doomed, "held": doomed, "reason": ""}
    if part.sealed:
        yield "seal", about
    if part.closing:
        yield "close", about | {"held": np.empty(0, np.int64)}


def _order(queue: TaskQueue, rows: RowTable, slots: np.ndarray) -> dict[str, np.ndarray]:
    """Rows that a restart offers: those that are claimed now, in the order of their puts, and then the ready ones."""
    claimed = slots[queue.states(slots) == CLAIMED]
    return {"slots": np.concatenate((claimed[np.argsort(rows.seq[claimed])], queue.arrival()))}


def _all_cells(part: Partition, house: Warehouse, groups: np.ndarray, slots: np.ndarray) -> dict[str, Any]:
    found: dict[str, Any] = {"parts": []}
    for (number, name), cells in house.cells.items():
        if number == part.number:
            shared = cells.part.shared
            index = groups if shared else slots
            index = index[index < len(cells.offsets)]
            ids = part.groups.id[index] if shared else index
            _add_cells(found, name, shared, ids, cells.offsets[index], cells.lengths[index])
    return found
