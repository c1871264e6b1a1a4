"""Questions about a pair's groups and rows, and claims cut into shares: verbs that only other parts of the dock use."""

from __future__ import annotations

import numpy as np

from mindspeed_asyncflow.dock.node import DockNode
from mindspeed_asyncflow.dock.queue import DONE
from mindspeed_asyncflow.dock.wire import Message, WireError
from mindspeed_asyncflow.errors import DockError


def find(node: DockNode, message: Message) -> dict:
    """Those of the groups that are here."""
    part = node.controller.partitions.get(message.text("partition"))
    ids = message.ints("group_ids")
    return {"found": ids[part.groups.lookup(ids) >= 0] if part is not None else ids[:0]}


def export(node: DockNode, message: Message) -> dict:
    """Groups of a partition in issue order and their rows, without those on their way out; see `snapshot`."""
    name = message.text("partition")
    part = node.controller.partitions.get(name)
    if part is None:
        raise DockError(f"there is no partition {name!r} on pair {node.pair}")
    rows, table = part.rows, part.groups
    groups = table.live()
    groups = groups[np.argsort(table.seq[groups])]
    slots = part.members(groups) if len(groups) else groups
    counts = np.bincount(rows.group[slots], minlength=table.capacity)[groups] if len(groups) else groups
    groups, counts = groups[counts > 0], counts[counts > 0]
    tasks = list(part.queues)
    return {
        "ids": table.id[groups], "sizes": table.size[groups], "counts": counts, "members": rows.member[slots],
        "rows": part.handles(slots), "ready": rows.ready[slots], "version_min": rows.version_min[slots],
        "version_max": rows.version_max[slots], "sealed": part.sealed, "tasks": tasks,
        "task_columns": [list(node.schema.tasks[t].columns) for t in tasks],
    } | {f"done{i}": part.queues[task].states(slots) == DONE for i, task in enumerate(tasks)}  # fmt: skip


def divide(node: DockNode, message: Message, now: float) -> dict:
    """An open claim becomes one claim per share; with `spread`, a part of the claim of that id over several pairs."""
    part, slots = node.controller.resolve(message.ints("rows"))
    counts, workers = message.ints("counts"), message.names("workers")
    if len(counts) != len(workers) or counts.sum() != len(slots) or (counts < 0).any():
        raise WireError("a claim is divided into one share per worker, all of its rows")
    shares = np.split(slots, np.cumsum(counts)[:-1])
    ids = node.controller.divide(message.whole("claim_id"), part, shares, workers, message.whole("spread"), now)
    return {"claim_ids": np.array(ids, np.int64)}
