"""Who gets which rows: pure functions over arrays.

A policy sees candidate units (rows or groups) in one of three orders and returns the positions that it grants:
`arrival` units that are ready, in the order in which they became so; `issue` units not yet granted, in the order of
their puts; `listed` the groups that the claim names. The window that it sees has at least `count` units if there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindspeed_asyncflow.dock.columns import nearest
from mindspeed_asyncflow.errors import DockError


def first_ready(ready: np.ndarray, count: int) -> np.ndarray:
    """Positions of the first `count` units that are ready. `ready` bool [n]."""
    return np.flatnonzero(ready)[:count]


def ready_prefix(ready: np.ndarray, count: int) -> np.ndarray:
    """Positions before the first unit that is not ready, at most `count`: unit k is granted only after unit k-1."""
    stop = len(ready) if ready.all() else int(np.argmin(ready))
    return np.arange(min(stop, count))


@dataclass(frozen=True, slots=True)
class Policy:
    order: Literal["arrival", "issue", "listed"]
    choose: Callable[[np.ndarray, int], np.ndarray]


POLICIES = {
    "fifo": Policy("arrival", first_ready),
    "in_order": Policy("issue", ready_prefix),
    "listed": Policy("listed", first_ready),  # taken when a claim names group ids
}


def pick(name: str, unit: str, group_ids: list[int] | None) -> Policy:
    """The policy of a claim. Raises DockError for an unknown name or a combination without meaning."""
    if unit not in ("rows", "groups"):
        raise DockError(f"a claim asks for unit 'rows' or 'groups', got {unit!r}")
    if group_ids is not None:
        name = "listed"
    if name not in POLICIES:
        raise DockError(f"unknown policy {name!r}{nearest(name, POLICIES)}")
    policy = POLICIES[name]
    if unit == "rows" and policy.order != "arrival":
        raise DockError(f"policy {name!r} grants whole groups: claim with unit='groups'")
    return policy
