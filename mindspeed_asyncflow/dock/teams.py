"""Consumers that claim together, round by round.

A team is named by (partition, task, team). The k-th claim of each of its ranks belongs to round k: the first rank that
comes starts the round and waits for its rows, every rank gets its share of it, early or late. A rank asks again only
after it has got its share, so a rank that is behind takes the rounds that it has missed first, in order.

How a round is split:
- `same`: every rank gets the very same grant of `count` units, under one claim (ranks of one tensor-parallel replica);
- `tokens`: `ranks * count` units are taken at once and divided with equal counts and balanced tokens;
- `fifo`: the same, dealt in turn.
The shares of the last two are claims of their own, each with its lease: a rank that never comes loses its share to
redelivery. In a sealed partition a tail is divided as evenly as possible: a share may be empty (claim 0, not sealed).

A round is forgotten when all ranks have it, or when the leases of its claims are over.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mindspeed_asyncflow.dock.partition import ClaimRequest, Grant
from mindspeed_asyncflow.errors import DockError

SPLITS = ("same", "tokens", "fifo")
TeamKey = tuple[str, str, str]  # partition, task, team


def dealt(count: int, parts: int) -> list[np.ndarray]:
    """Index arrays of `count` units dealt to `parts` in turn."""
    return [np.arange(part, count, parts) for part in range(parts)]


def balanced(tokens: np.ndarray, parts: int) -> list[np.ndarray]:
    """Index arrays: counts as equal as possible, sums of `tokens` [n] close together. Never worse than `dealt`.

    Longest first, each to the part with the fewest tokens that has room: one with a very long unit ends up with the
    shortest others.
    """
    tokens = np.asarray(tokens, np.int64)
    order = np.argsort(-tokens, kind="stable")
    least, longer = divmod(len(tokens), parts)  # `longer` parts hold one unit more
    owner: list[int] = []
    heap = [(0, part) for part in range(parts)]
    counts = [0] * parts
    for number in tokens[order].tolist():
        while counts[heap[0][1]] > least or (counts[heap[0][1]] == least and not longer):
            heapq.heappop(heap)
        load, part = heap[0]
        owner.append(part)
        longer -= counts[part] == least
        counts[part] += 1
        heapq.heapreplace(heap, (load + number, part))
    owners = np.empty(len(order), np.int64)
    owners[order] = owner
    loads = np.bincount(owners, weights=tokens, minlength=parts)
    turns = dealt(len(tokens), parts)
    if loads.max(initial=0) > max((int(tokens[turn].sum()) for turn in turns), default=0):
        return turns
    return [np.flatnonzero(owners == part) for part in range(parts)]


def divide(tokens: np.ndarray, units: np.ndarray, ranks: int, split: str) -> list[np.ndarray]:
    """Which rows each rank gets. `tokens` [n] per row; `units` [n] tells the unit (row or group) of each row.

    Units are not torn apart. Rows keep their order within a share.
    """
    if split == "same":
        return [np.arange(len(tokens))] * ranks
    _, first, unit = np.unique(units, return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int64)
    place[np.argsort(first)] = np.arange(len(first))  # units in the order of their first rows
    unit = place[unit]
    sums = np.bincount(unit, weights=tokens, minlength=len(first)).astype(np.int64)
    parts = balanced(sums, ranks) if split == "tokens" else dealt(len(first), ranks)
    owner = np.empty(len(first), np.int64)
    for rank, part in enumerate(parts):
        owner[part] = rank
    return [np.flatnonzero(owner[unit] == rank) for rank in range(ranks)]


def part_of(grant: Grant, index: np.ndarray, claim_id: int) -> Grant:
    """The rows `index` of a grant, as a share under `claim_id`. What was dropped is not repeated."""
    return replace(
        grant, claim_id=claim_id, rows=grant.rows[index], group_ids=grant.group_ids[index],
        members=grant.members[index], version_min=grant.version_min[index], version_max=grant.version_max[index],
        tokens=grant.tokens[index], dropped=[], slots=None,
    )  # fmt: skip


@dataclass(slots=True)
class _Round:
    shares: Sequence[Grant]  # by rank
    left: set[int]  # ranks that have not come yet
    deadline: float


@dataclass(slots=True)
class _Team:
    ranks: int
    split: str
    next_of: list[int]  # per rank: the round that its next claim belongs to
    next_round: int = 0
    rounds: dict[int, _Round] = field(default_factory=dict)
    parked: dict[object, ClaimRequest] = field(default_factory=dict)


class Teams:
    """`valid(share, split)` tells whether the claim of a share can still be taken over by its rank; `alive(share)`
    until when its lease lasts, None when it has ended."""

    def __init__(
        self, lease_s: float, valid: Callable[[Grant, str], bool], alive: Callable[[Grant], float | None]
    ) -> None:  # fmt: skip
        self.lease_s = lease_s
        self._valid, self._alive = valid, alive
        self._teams: dict[TeamKey, _Team] = {}

    def __contains__(self, key: TeamKey) -> bool:
        return key in self._teams

    def check(self, request: ClaimRequest) -> None:
        """Raises DockError when the claim does not fit to what its team does."""
        if request.split not in SPLITS:
            raise DockError(f"a team splits its rounds by one of {', '.join(SPLITS)}; got {request.split!r}")
        if not 0 <= request.rank < request.ranks:
            raise DockError(f"rank {request.rank} of a team of {request.ranks} cannot be")
        team = self._teams.get(team_key(request))
        if team is None:
            self._teams[team_key(request)] = _Team(request.ranks, request.split, [0] * request.ranks)
        elif (team.ranks, team.split) != (request.ranks, request.split):
            raise DockError(
                f"team {request.team!r} has {team.ranks} ranks and splits by {team.split!r}; "
                f"rank {request.rank} came with {request.ranks} and {request.split!r}"
            )

    def take(self, request: ClaimRequest) -> Grant | None:
        """The share of the next round of this rank, if that round has its rows already."""
        team = self._teams[team_key(request)]
        for number in sorted(n for n in team.rounds if n >= team.next_of[request.rank]):
            held = team.rounds[number]
            team.next_of[request.rank] = number + 1
            held.left.discard(request.rank)
            if not held.left:
                del team.rounds[number]
            share = held.shares[request.rank]
            if self._valid(share, team.split):
                return share
        team.next_of[request.rank] = team.next_round
        return None

    def park(self, request: ClaimRequest) -> None:
        self._teams[team_key(request)].parked[request.key] = request

    def unpark(self, request: ClaimRequest) -> None:
        team = self._teams.get(team_key(request))
        if team is not None:
            team.parked.pop(request.key, None)

    def offer(self, key: TeamKey, shares: Sequence[Grant], now: float) -> list[ClaimRequest]:
        """Puts the next round of a team in place; returns the parked requests that `take` has a share for now.

        `shares[rank]` may come from anywhere: rows that another pair has granted are divided by `divide` and
        `part_of`, keep the claim ids of that pair, and their leases are kept there.
        """
        team = self._teams[key]
        if len(shares) != team.ranks:
            raise DockError(f"a round of team {key[2]!r} needs {team.ranks} shares, got {len(shares)}")
        team.rounds[team.next_round] = _Round(shares, set(range(team.ranks)), now + self.lease_s)
        team.next_round += 1
        first_of_rank = {r.rank: r for r in reversed(team.parked.values())}
        return [r for r in team.parked.values() if first_of_rank[r.rank] is r]

    def tick(self, now: float) -> None:
        """Forgets rounds that nobody can take any more."""
        for team in self._teams.values():
            for number, held in list(team.rounds.items()):
                if held.deadline <= now:
                    ends = [end for rank in held.left if (end := self._alive(held.shares[rank])) is not None]
                    held.deadline = max(ends, default=now)
                    if held.deadline <= now:
                        del team.rounds[number]

    def next_deadline(self) -> float | None:
        return min((held.deadline for team in self._teams.values() for held in team.rounds.values()), default=None)

    def forget(self, partition: str) -> None:
        """The partition is gone: its teams begin again with round 0, but for those that wait."""
        for key in [k for k, team in self._teams.items() if k[0] == partition]:
            old = self._teams[key]
            if old.parked:
                self._teams[key] = _Team(old.ranks, old.split, [0] * old.ranks, parked=old.parked)
            else:
                del self._teams[key]


def team_key(request: ClaimRequest) -> TeamKey:
    return request.partition, request.task, request.team
