"""Which pair gets which prompt group: pure functions.

A group lives on one pair, so that it can be claimed whole in one place. Whoever puts whole groups chooses by free
bytes and load; members of a group that come in several puts meet at the home that the group's id names, because the
producers of one group may be many.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Room:
    """What a producer knows of one pair; refreshed by every answer to a put."""

    capacity_bytes: int
    free_bytes: int
    rows: int = 0


def named_home(partition: str, name: int | str, pairs: Sequence[int]) -> int:
    """The pair that everybody computes for a name: of a group whose members come in several puts, or of a team.

    The one with the highest draw for this name: when another pair is lost, it stays the same.
    """
    return max(pairs, key=lambda pair: hashlib.blake2b(f"{partition}/{name}/{pair}".encode(), digest_size=8).digest())


def spread(nbytes: np.ndarray, counts: np.ndarray, rooms: Sequence[Room]) -> np.ndarray:
    """Home of each group: int64 [groups]; groups of `nbytes` bytes and `counts` rows each.

    Each group goes to the pair that is least loaded after those before it. Load is the larger of two shares: bytes
    used over capacity, and rows over the mean of all pairs, so that neither memory nor work piles up on one node.
    """
    total_rows = sum(room.rows for room in rooms) + int(counts.sum())
    used = [room.capacity_bytes - room.free_bytes for room in rooms]
    rows = [room.rows for room in rooms]

    def load(pair: int) -> float:
        share = rows[pair] / total_rows if total_rows else 0.0
        return max(used[pair] / max(rooms[pair].capacity_bytes, 1), share) + 1e-9 * pair

    heap = [(load(pair), pair) for pair in range(len(rooms))]
    heapq.heapify(heap)
    homes = np.empty(len(nbytes), np.int64)
    for i, (size, count) in enumerate(zip(nbytes.tolist(), counts.tolist())):
        pair = heap[0][1]
        homes[i] = pair
        used[pair] += size
        rows[pair] += count
        heapq.heapreplace(heap, (load(pair), pair))
    return homes
