"""Open claims and their leases. Knows no rows' states: the controller tells it what ends and asks what has run out."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from mindspeed_asyncflow.errors import ClaimLost, ClaimUnknown, DockError

PAIR_SHIFT = 48  # claim id: pair, then a counter
SPREAD_CLAIM = 1 << 62  # bit of the id of a claim that a client gathers from several pairs: each knows its own rows
_REMEMBERED = 4096  # ended claims whose reason is still known
_Key = tuple[str, str, str]  # partition, task, owner


@dataclass(slots=True)
class OpenClaim:
    id: int
    partition: str
    task: str
    worker: str
    deadline: float  # s, controller clock
    slots: np.ndarray = field(repr=False)  # int64: rows that are still claimed
    key: _Key
    sharers: set[str] | None = None  # workers that were given the same claim: it ends when one of them is lost


class LeaseBook:
    def __init__(self, lease_s: float, first: int = 1, pair: int = 0) -> None:
        self.lease_s = lease_s
        self.open: dict[int, OpenClaim] = {}
        self._heap: list[tuple[float, int]] = []
        self._ended: dict[int, str] = {}
        self._order: deque[int] = deque()
        self._pair = pair
        self._next = (pair << PAIR_SHIFT) | first
        self.held: dict[_Key, int] = {}  # rows claimed by (partition, task, owner)

    def set_pair(self, pair: int) -> None:
        self._next += (pair - self._pair) << PAIR_SHIFT
        self._pair = pair

    def start(
        self, partition: str, task: str, worker: str, slots: np.ndarray, now: float, owner: str = "", spread: int = 0
    ) -> OpenClaim:  # fmt: skip
        """A new claim of `worker`. Its rows are held by `owner`, if given: a team rather than the worker.

        `spread`: the id that the client has chosen for a claim over several pairs; a second grant under it adds rows.
        """
        key = (partition, task, owner or worker)
        if spread:
            return self._extend(spread, key, worker, slots, now)
        number = self._next
        claim = OpenClaim(number, partition, task, worker, now + self.lease_s, slots, key)
        self._next = number + 1
        self._open(claim)
        return claim

    def _open(self, claim: OpenClaim) -> None:
        self.open[claim.id] = claim
        heapq.heappush(self._heap, (claim.deadline, claim.id))
        self.held[claim.key] = self.held.get(claim.key, 0) + len(claim.slots)

    def _extend(self, number: int, key: _Key, worker: str, slots: np.ndarray, now: float) -> OpenClaim:
        claim = self.open.get(number)
        if claim is None:
            claim = OpenClaim(number, key[0], key[1], worker, now + self.lease_s, slots, key)
            self._open(claim)
            return claim
        if claim.key != key:
            raise DockError(f"claim {number} is one of {claim.key[2]!r} for task {claim.task!r} and takes no others")
        claim.slots = np.concatenate((claim.slots, slots))
        claim.deadline = now + self.lease_s
        self.held[key] += len(slots)
        return claim

    def get(self, claim_id: int, now: float) -> OpenClaim:
        """The open claim, its lease renewed. Raises ClaimLost when it has ended."""
        claim = self.open.get(claim_id)
        if claim is None:
            kind = ClaimUnknown if claim_id & SPREAD_CLAIM and claim_id not in self._ended else ClaimLost
            raise kind(
                f"claim {claim_id} is not open: {self._why(claim_id)}; its rows may belong to another worker now"
            )
        claim.deadline = now + self.lease_s
        return claim

    def _why(self, claim_id: int) -> str:
        if claim_id in self._ended:
            return self._ended[claim_id]
        if claim_id & SPREAD_CLAIM:
            return f"pair {self._pair} never granted a row under it"
        pair = claim_id >> PAIR_SHIFT
        if pair != self._pair:
            return f"it is one of pair {pair}, this is pair {self._pair}"
        known = pair << PAIR_SHIFT < claim_id < self._next
        return "it has ended" if known else "it was never granted"

    def shorten(self, claim: OpenClaim, slots: np.ndarray, reason: str, voluntary: bool = False) -> None:
        """`slots` leave the claim; the last ones end it. `voluntary`: because its holder said so."""
        gone = len(slots)
        left = self.held[claim.key] - gone
        if left:
            self.held[claim.key] = left
        else:
            del self.held[claim.key]
        if gone < len(claim.slots):
            claim.slots = claim.slots[~np.isin(claim.slots, slots)]
            return
        claim.slots = claim.slots[:0]
        del self.open[claim.id]
        if not (voluntary and claim.id & SPREAD_CLAIM):  # that one is ended part by part, and may have rows here again
            self.note_ended(claim.id, reason)
        if len(self._heap) > 2 * len(self.open) + 1024:  # claims that ended long before their lease
            self._heap = [(c.deadline, c.id) for c in self.open.values()]
            heapq.heapify(self._heap)

    def note_ended(self, claim_id: int, reason: str) -> None:
        """Whoever comes with this claim is told why it is no more."""
        if claim_id not in self._ended:
            self._order.append(claim_id)
        self._ended[claim_id] = reason
        if len(self._order) > _REMEMBERED:
            del self._ended[self._order.popleft()]

    def spread_claims(self) -> list[int]:
        """Claims over several pairs that hold rows here, or whose rows were taken back."""
        return [number for number in (*self._ended, *self.open) if number & SPREAD_CLAIM]

    def run_out(self, now: float) -> list[OpenClaim]:
        """Claims whose lease has ended; the caller takes their rows back."""
        out: dict[int, OpenClaim] = {}  # a claim over several pairs that came again may have two entries
        while self._heap and self._heap[0][0] <= now:
            _, claim_id = heapq.heappop(self._heap)
            claim = self.open.get(claim_id)
            if claim is None:
                continue
            if claim.deadline > now:  # was renewed
                heapq.heappush(self._heap, (claim.deadline, claim_id))
            else:
                out[claim_id] = claim
        return list(out.values())

    def of_worker(self, worker: str) -> list[OpenClaim]:
        return [c for c in self.open.values() if c.worker == worker or (c.sharers is not None and worker in c.sharers)]

    def ended_as(self, claim_id: int) -> str | None:
        """Why a claim has ended; None: it has not, or so long ago that nobody remembers."""
        return self._ended.get(claim_id)

    def extend_all(self, seconds: float) -> None:
        """Every lease lasts `seconds` longer: time in which nobody could answer."""
        for claim in self.open.values():
            claim.deadline += seconds

    def next_deadline(self) -> float | None:
        while self._heap and self._heap[0][1] not in self.open:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
