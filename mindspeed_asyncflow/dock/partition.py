"""One partition: its rows, its groups, and a queue per task; what a consumer asks of it and what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_asyncflow.dock.policies import pick
from mindspeed_asyncflow.dock.queue import TaskQueue
from mindspeed_asyncflow.dock.table import NO_VERSION, GroupTable, RowTable, pack_handles

Dropped = tuple[int, np.ndarray, str]  # group id, row handles, reason


@dataclass(slots=True)
class ClaimRequest:
    """What a consumer asks for. `count` and `at_least` are in units (rows or groups)."""

    task: str
    partition: str
    count: int
    worker: str
    deadline: float  # s, controller clock
    key: object = None  # names the request in `outcomes`
    unit: str = "rows"
    policy: str = "fifo"
    group_ids: list[int] | None = None
    min_version: int | None = None
    at_least: int = 1
    max_age_s: float | None = None  # since the put; older rows are dropped as "stale"
    seed: int = 0  # of the policy "random"
    peek: bool = False  # takes nothing: answered, after all others, with the number of ready units
    team: str = ""  # consumers that claim together, round by round (see `teams`)
    rank: int = 0
    ranks: int = 1
    split: str = "same"  # how a round is divided over the team: same, tokens, fifo
    started: float = 0.0
    dropped: list[Dropped] = field(default_factory=list)


@dataclass(slots=True)
class Grant:
    """Rows given to one worker. `claim_id` 0 and no rows: nothing was left (see `sealed`) or everything was stale."""

    claim_id: int
    rows: np.ndarray  # int64 [n] handles
    group_ids: np.ndarray  # int64 [n]
    members: np.ndarray  # int32 [n]
    version_min: np.ndarray  # int32 [n], -1: no versioned write yet
    version_max: np.ndarray  # int32 [n]
    tokens: np.ndarray  # int64 [n]
    dropped: list[Dropped]
    sealed: bool  # the task has had all rows of the partition: nothing will come any more
    ready: int = 0  # units of the task that are ready after this grant


class Partition:
    """Rows that know nothing of the rows of other partitions."""

    def __init__(self, name: str, number: int, tasks: Sequence[str], pair: int = 0) -> None:
        self.name, self.number, self.pair = name, number, pair
        self.rows, self.groups = RowTable(), GroupTable()
        self.queues = {task: TaskQueue(self.rows, self.groups) for task in tasks}
        self.sealed = False

    def handles(self, slots: np.ndarray) -> np.ndarray:
        return pack_handles(self.pair, self.number, slots, self.rows.generation[slots])

    def members(self, groups: np.ndarray) -> np.ndarray:
        """Row slots of `groups` (slots, at least one) without those that are on their way out."""
        slots = np.concatenate([self.groups.rows[g] for g in groups.tolist()])
        return slots[~self.rows.doomed[slots]]

    def stale(self, units: np.ndarray, groups: bool, min_version: int | None) -> np.ndarray:
        """bool [units]: rows, or groups with a row, older than the bound. A row without a version has no age."""
        if min_version is None or not len(units):
            return np.zeros(len(units), bool)
        slots = self.members(units) if groups else units
        version = self.rows.version_min[slots]
        old = (version != NO_VERSION) & (version < min_version)
        return np.isin(units, self.rows.group[slots[old]]) if groups else old

    def candidates(self, request: ClaimRequest) -> np.ndarray:
        """Units (row or group slots) that the policy of `request` picks now, at most `count`."""
        policy = pick(request.policy, request.unit, request.group_ids)
        queue = self.queues[request.task]
        if policy.order == "issue":
            units, ready = queue.next_groups(request.count)
        elif policy.order == "listed":
            by_id = self.groups.by_id
            units = np.array([by_id[i] for i in dict.fromkeys(request.group_ids or ()) if i in by_id], np.int64)
            ready = queue.whole(units)
        else:
            units = queue.first_groups(request.count) if request.unit == "groups" else queue.first_rows(request.count)
            ready = np.ones(len(units), bool)
        return units[policy.choose(ready, request.count)]

    def grant(self, claim_id: int, slots: np.ndarray, dropped: list[Dropped], sealed: bool) -> Grant:
        rows = self.rows
        return Grant(
            claim_id, self.handles(slots), self.groups.id[rows.group[slots]], rows.member[slots],
            rows.version_min[slots], rows.version_max[slots], rows.tokens[slots], dropped, sealed,
        )  # fmt: skip
