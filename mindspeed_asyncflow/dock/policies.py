"""Who gets which rows: pure functions over arrays.

A policy looks at units (rows or groups) of a task in an order and chooses the positions that it grants. The orders:
`arrival` units that are ready, as they became so; `key` units that are ready, lowest key first, with the key computed
by a pure function of what is known of each unit (`Facts`) and the seed of the claim; `issue` the same over units that
are not yet granted, ready or not; `listed` the groups that the claim names. A queue keeps each order in use up to date,
so a policy is exact over all units while a claim looks at the first few. A new policy is one entry of `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindspeed_asyncflow.dock.columns import nearest
from mindspeed_asyncflow.errors import DockError


@dataclass(frozen=True, slots=True)
class Facts:
    """What a key may depend on, per unit; all [n]. Of a group: the lowest of its rows, tokens in sum."""

    put: np.ndarray  # int64, place in the order of the puts
    version: np.ndarray  # int64, oldest policy version; the largest number where no policy wrote
    tokens: np.ndarray  # int64
    group_id: np.ndarray  # int64
    member: np.ndarray  # int64; -1 for a group


Key = Callable[[Facts, int], np.ndarray]  # facts, seed -> numbers [n]


def by_put(facts: Facts, seed: int) -> np.ndarray:
    return facts.put


def by_oldest_version(facts: Facts, seed: int) -> np.ndarray:
    return facts.version


def shuffled(facts: Facts, seed: int) -> np.ndarray:
    """A number that looks random, the same for the same seed, group id and member. Mixing steps of SplitMix64."""
    number = np.full(len(facts.put), seed & (2**64 - 1), np.uint64)
    for part in (facts.group_id, facts.member):
        number = (number ^ part.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        number ^= number >> np.uint64(31)
    return number


def first_ready(ready: np.ndarray, count: int) -> np.ndarray:
    """Positions of the first `count` units that are ready. `ready` bool [n]."""
    return np.flatnonzero(ready)[:count]


def ready_prefix(ready: np.ndarray, count: int) -> np.ndarray:
    """Positions before the first unit that is not ready, at most `count`: unit k is granted only after unit k-1."""
    stop = len(ready) if ready.all() else int(np.argmin(ready))
    return np.arange(min(stop, count))


@dataclass(frozen=True, slots=True)
class Policy:
    order: Literal["arrival", "key", "issue", "listed"]
    choose: Callable[[np.ndarray, int], np.ndarray] = first_ready
    key: Key = by_put
    seeded: bool = False  # whether `key` looks at the seed: each seed in use has an order of its own


POLICIES = {
    "fifo": Policy("arrival"),
    "oldest": Policy("key", key=by_put),
    "by_version": Policy("key", key=by_oldest_version),
    "random": Policy("key", key=shuffled, seeded=True),
    "in_order": Policy("issue", ready_prefix),
    "listed": Policy("listed"),  # taken when a claim names group ids
}


def pick(name: str, unit: str, group_ids: list[int] | None) -> Policy:
    """The policy of a claim. Raises DockError for an unknown name or a combination without meaning."""
    if unit not in ("rows", "groups"):
        raise DockError(f"a claim asks for unit 'rows' or 'groups', got {unit!r}")
    if group_ids is not None:
        name = "listed"
    policy = POLICIES.get(name)
    if policy is None:
        raise DockError(f"unknown policy {name!r}{nearest(name, POLICIES)}")
    if unit == "rows" and policy.order in ("issue", "listed"):
        raise DockError(f"policy {name!r} grants whole groups: claim with unit='groups'")
    return policy
