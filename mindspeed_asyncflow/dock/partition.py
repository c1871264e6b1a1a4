"""One partition: its rows, its groups, and a queue per task; what a consumer asks of it and what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_asyncflow.dock.policies import Policy, pick
from mindspeed_asyncflow.dock.queue import TaskQueue
from mindspeed_asyncflow.dock.table import (
    NO_VERSION,
    GroupTable,
    RowTable,
    pack_handles,
)

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
    team: str = ""  # consumers that claim together, round by round (see `teams`)
    rank: int = 0
    ranks: int = 1
    split: str = "same"  # how a round is divided over the team: same, tokens, fifo
    claim_id: int = 0  # chosen by the client for a claim over several pairs; else the pair chooses
    hold_end: bool = False  # the stream goes on elsewhere: its end here is no answer, it is listed in `ends`
    started: float = 0.0
    dropped: list[Dropped] = field(default_factory=list)

    @property
    def shares(self) -> int:
        """Into how many claims the units are divided: a team takes `shares * count`."""
        return self.ranks if self.team and self.split != "same" else 1

    @property
    def needs(self) -> int:
        """Units that must be ready before anything is granted, unless they are the last."""
        return self.at_least * self.shares

    @property
    def owner(self) -> str:
        """Whom its rows count for when the end of a stream is looked for: nobody waits for rows of its own team."""
        return f"team {self.team}" if self.team else self.worker


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
    slots: np.ndarray | None = None  # of the rows, as the claim holds them


class Partition:
    """Rows that know nothing of the rows of other partitions. `first`: generation of the first row of each slot."""

    def __init__(self, name: str, number: int, tasks: Sequence[str], pair: int = 0, first: int = 1) -> None:
        self.name, self.number, self.pair = name, number, pair
        self.rows, self.groups = RowTable(first), GroupTable()
        self.queues = {task: TaskQueue(self.rows, self.groups) for task in tasks}
        self.sealed = False
        self.closing = False  # goes with its last row

    def handles(self, slots: np.ndarray) -> np.ndarray:
        return pack_handles(self.pair, self.number, slots, self.rows.generation[slots])

    def members(self, groups: np.ndarray) -> np.ndarray:
        """Row slots of `groups` (slots, at least one) without those that are on their way out."""
        return self.rows.lasting(self.groups.members(groups)[0])

    def as_rows(self, request: ClaimRequest, policy: Policy) -> bool:
        """Whether the units of a claim are rows: asked for, or because every group is a single row."""
        return request.unit == "rows" or (self.groups.singles and policy.order in ("arrival", "key"))

    def stale(self, units: np.ndarray, groups: bool, request: ClaimRequest, now: float) -> np.ndarray | None:
        """bool [units]: rows, or groups with a row, older than a bound; None: no bound. No version is no age."""
        if request.min_version is None and request.max_age_s is None:
            return None
        rows = self.rows
        slots, fill = self.groups.members(units) if groups else (units, None)
        old = np.zeros(len(slots), bool)
        if request.min_version is not None:
            version = rows.version_min[slots]
            old |= (version != NO_VERSION) & (version < request.min_version)
        if request.max_age_s is not None:
            old |= now - rows.born[slots] > request.max_age_s
        if fill is None or not len(units):
            return old
        return np.logical_or.reduceat(old & ~rows.doomed[slots], np.cumsum(fill) - fill)

    def candidates(self, request: ClaimRequest, groups: bool, count: int) -> np.ndarray:
        """Units (row or group slots) that the policy of `request` picks now, at most `count`."""
        policy = pick(request.policy, request.unit, request.group_ids)
        queue = self.queues[request.task]
        if policy.order == "listed":
            units = self.groups.lookup(np.array(list(dict.fromkeys(request.group_ids or ())), np.int64))
            units = units[units >= 0]
            ready: np.ndarray | None = queue.whole(units)
        else:
            units, ready = queue.next(policy, request.seed, groups, count)
        return units if ready is None else units[policy.choose(ready, count)]

    def grant(self, claim_id: int, slots: np.ndarray, dropped: list[Dropped], sealed: bool, ready: int) -> Grant:
        rows = self.rows
        return Grant(
            claim_id, self.handles(slots), self.groups.id[rows.group[slots]], rows.member[slots],
            rows.version_min[slots], rows.version_max[slots], rows.tokens[slots], dropped, sealed, ready, slots,
        )  # fmt: skip
