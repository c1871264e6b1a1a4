"""Messages as the verbs of a node read and write them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from mindspeed_asyncflow.dock.partition import Grant
from mindspeed_asyncflow.dock.wire import Message, WireError
from mindspeed_asyncflow.errors import DockError


class Ask(msgspec.Struct):
    """The plain values of a claim."""

    task: str
    partition: str
    count: int
    worker: str
    timeout_s: float
    unit: str
    policy: str
    min_version: int | None
    at_least: int
    columns: list[str]
    copy: bool
    max_age_s: float | None
    seed: int
    team: str
    rank: int
    ranks: int
    split: str
    claim_id: int = 0


def read_ask(message: Message) -> Ask:
    """Raises WireError unless every value is there and of its type."""
    try:
        ask = msgspec.convert(message, Ask)
    except msgspec.ValidationError as error:
        raise WireError(f"a claim is not what it should be: {error}") from error
    if not math.isfinite(ask.timeout_s) or not math.isfinite(ask.max_age_s or 0.0):
        raise WireError("a time is not a finite number")
    return ask


def grant_message(grant: Grant) -> dict[str, Any]:
    rows = np.empty((6, len(grant.rows)), np.int64)
    rows[0], rows[1], rows[2] = grant.rows, grant.group_ids, grant.members
    rows[3], rows[4], rows[5] = grant.version_min, grant.version_max, grant.tokens
    body = {
        "claim_id": grant.claim_id,
        "sealed": grant.sealed,
        "ready": grant.ready,
        "grant": rows,
        "dropped_groups": [],
    }
    if grant.dropped:
        body |= {
            "dropped_groups": [g for g, _, _ in grant.dropped], "dropped_reasons": [r for _, _, r in grant.dropped],
            "dropped_counts": [len(r) for _, r, _ in grant.dropped],
            "dropped_rows": np.concatenate([r for _, r, _ in grant.dropped]),
        }  # fmt: skip
    return body


def read_versions(message: Message, rows: int) -> tuple[np.ndarray, np.ndarray] | None:
    if message.get("version_min") is None:
        return None
    low, high = message.ints("version_min", "int32"), message.ints("version_max", "int32")
    if not len(low) == len(high) == rows or not bool((low <= high).all()):
        raise DockError("versions are (oldest, newest) per row, oldest <= newest")
    return low, high
