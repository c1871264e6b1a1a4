"""What a controller tells people: who waits for what, and how many rows are where."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_asyncflow.dock.columns import nearest
from mindspeed_asyncflow.dock.partition import ClaimRequest, Partition
from mindspeed_asyncflow.dock.queue import STATE_NAMES, WAITING
from mindspeed_asyncflow.errors import DeadlineExceeded

if TYPE_CHECKING:
    from mindspeed_asyncflow.dock.claims import Claims
    from mindspeed_asyncflow.dock.controller import Controller


@dataclass(slots=True)
class TaskCounters:
    """Since the start of the controller; never reset."""

    claims_granted: int = 0
    rows_granted: int = 0
    wait_s: float = 0.0  # of answered claims, in sum
    longest_wait_s: float = 0.0
    rows_redelivered: int = 0
    leases_expired: int = 0


def too_late(control: Claims, request: ClaimRequest, now: float) -> DeadlineExceeded:
    waited = f"{request.worker!r} waited {now - request.started:.1f} s"
    what = f"{waited} for {request.at_least} {request.unit} of task {request.task!r}"
    part = control.partitions.get(request.partition)
    if part is None:
        return DeadlineExceeded(
            f"{what}: nobody has put a row into partition {request.partition!r}"
            f"{nearest(request.partition, control.partitions)}"
        )
    queue = part.queues[request.task]
    return DeadlineExceeded(f"{what} in partition {part.name!r}: {queue.whole_groups} whole groups and "
                            f"{queue.ready_rows} rows are ready, {missing(control, part, request.task)}")  # fmt: skip


def missing(control: Claims, part: Partition, task: str) -> str:
    """In words: which columns the waiting rows of `task` lack, and who holds claimed ones. Looks at all rows."""
    queue = part.queues[task]
    slots = np.flatnonzero(part.rows.alive[: part.rows.capacity])
    slots = slots[queue.states(slots) == WAITING]
    absent = [
        f"{name} ({int(((part.rows.ready[slots] & control.schema.bit[name]) == 0).sum())})"
        for name in control.schema.tasks[task].columns
    ]
    lacking = f"{len(slots)} rows lack a column: {', '.join(a for a in absent if not a.endswith('(0)')) or 'none'}"
    workers = [f"{w!r} ({n})" for (p, t, w), n in control.leases.held.items() if (p, t) == (part.name, task)]
    return f"{lacking}; claimed rows by worker: {', '.join(workers) or 'none'}"


def stats(control: Controller) -> dict:
    """Rows by state per partition and task, counters per task and column, drops by reason, who waits for what how long.

    Plain dicts of numbers and words. Counters only rise.
    """
    waiting = [
        {"task": r.task, "partition": r.partition, "worker": r.worker, "at_least": r.at_least, "unit": r.unit,
         "waited_s": control.now - r.started, "team": r.team}
        for r in control.waiting
    ]  # fmt: skip
    partitions = {
        part.name: {
            "rows": part.rows.count,
            "groups": len(part.groups.by_id),
            "sealed": part.sealed,
            "closing": part.closing,
            "tasks": {
                task: {STATE_NAMES[s]: queue.counts[s] for s in range(WAITING, len(STATE_NAMES))}
                | {"whole_groups": queue.whole_groups}
                for task, queue in part.queues.items()
            },
        }
        for part in control.partitions.values()
    }
    return {
        "pair": control.pair,
        "partitions": partitions,
        "tasks": {task: asdict(control.counters_of(task)) for task in control.schema.tasks},
        "columns": {name: {"rows_written": control.rows_written[name]} for name in control.schema.columns},
        "claims": len(control.leases.open),
        "leases_expired": sum(c.leases_expired for c in control.counters.values()),
        "drops": dict(control.drops),
        "waiting": waiting,
    }
