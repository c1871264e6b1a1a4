"""Open claims and their leases. Knows no rows' states: the controller tells it what ends and asks what has run out."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from mindspeed_asyncflow.errors import ClaimLost

_REMEMBERED = 4096  # ended claims whose reason is still known


@dataclass(slots=True)
class OpenClaim:
    id: int
    partition: str
    task: str
    worker: str
    deadline: float  # s, controller clock
    slots: np.ndarray = field(repr=False)  # int64: rows that are still claimed


class LeaseBook:
    def __init__(self, lease_s: float, first: int = 1) -> None:
        self.lease_s = lease_s
        self.open: dict[int, OpenClaim] = {}
        self._heap: list[tuple[float, int]] = []
        self._ended: dict[int, str] = {}
        self._order: deque[int] = deque()
        self._next = first
        self.held: dict[tuple[str, str, str], int] = {}  # rows claimed by (partition, task, worker)
        self.expired = 0

    def start(self, partition: str, task: str, worker: str, slots: np.ndarray, now: float) -> OpenClaim:
        claim = OpenClaim(self._next, partition, task, worker, now + self.lease_s, slots)
        self._next += 1
        self.open[claim.id] = claim
        heapq.heappush(self._heap, (claim.deadline, claim.id))
        self._hold(claim, len(slots))
        return claim

    def get(self, claim_id: int, now: float) -> OpenClaim:
        """The open claim, its lease renewed. Raises ClaimLost when it has ended."""
        claim = self.open.get(claim_id)
        if claim is None:
            reason = self._ended.get(claim_id, "it has ended" if 0 < claim_id < self._next else "it was never granted")
            raise ClaimLost(f"claim {claim_id} is not open: {reason}; its rows may belong to another worker now")
        claim.deadline = now + self.lease_s
        return claim

    def shorten(self, claim: OpenClaim, slots: np.ndarray, reason: str) -> None:
        """`slots` leave the claim; the last ones end it."""
        left = claim.slots[~np.isin(claim.slots, slots)] if len(slots) < len(claim.slots) else claim.slots[:0]
        self._hold(claim, len(left) - len(claim.slots))
        claim.slots = left
        if not len(left):
            del self.open[claim.id]
            self._ended[claim.id] = reason
            self._order.append(claim.id)
            if len(self._order) > _REMEMBERED:
                del self._ended[self._order.popleft()]

    def run_out(self, now: float) -> list[OpenClaim]:
        """Claims whose lease has ended; the caller takes their rows back."""
        out = []
        while self._heap and self._heap[0][0] <= now:
            _, claim_id = heapq.heappop(self._heap)
            claim = self.open.get(claim_id)
            if claim is None:
                continue
            if claim.deadline > now:  # was renewed
                heapq.heappush(self._heap, (claim.deadline, claim_id))
            else:
                out.append(claim)
        self.expired += len(out)
        return out

    def of_worker(self, worker: str) -> list[OpenClaim]:
        return [claim for claim in self.open.values() if claim.worker == worker]

    def next_deadline(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def _hold(self, claim: OpenClaim, change: int) -> None:
        key = (claim.partition, claim.task, claim.worker)
        self.held[key] = self.held.get(key, 0) + change
        if not self.held[key]:
            del self.held[key]
