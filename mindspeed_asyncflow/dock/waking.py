"""Parked claims are answered by the verb that satisfies them, oldest first; never while the controller is frozen."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mindspeed_asyncflow.dock.leases import LeaseBook
from mindspeed_asyncflow.dock.partition import ClaimRequest, Grant, Partition
from mindspeed_asyncflow.dock.policies import Policy, pick
from mindspeed_asyncflow.dock.queue import CLAIMED, READY, WAITING, TaskQueue
from mindspeed_asyncflow.dock.waiting import Bucket, QueueKey, Waiting
from mindspeed_asyncflow.errors import AsyncFlowError


class Unwoken:
    """See `Waking.unwoken`."""

    __slots__ = ("_now", "_waking")

    def __init__(self, waking: Waking, now: float) -> None:
        self._waking, self._now = waking, now

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        self._waking._unwoken = False
        if kind is None:
            self._waking.wake(self._now)


class Waking(ABC):
    def __init__(self, leases: LeaseBook) -> None:
        self.leases = leases
        self.partitions: dict[str, Partition] = {}
        self.waiting = Waiting()
        self.outcomes: list[tuple[object, Grant | AsyncFlowError]] = []
        self.touched: set[QueueKey] = set()  # queues that may satisfy somebody now
        self.now = 0.0  # the clock at the last verb
        self._frozen_at: float | None = None
        self._unwoken = False

    @abstractmethod
    def _attempt(self, request: ClaimRequest, policy: Policy, now: float) -> Grant | None:
        """What a claim gets now; None: it waits."""

    @abstractmethod
    def cancel(self, key: object) -> None:
        """Takes a parked request out."""

    @property
    def frozen(self) -> bool:
        """While true nothing is granted to parked claims and no lease ends; leases are longer by that time after."""
        return self._frozen_at is not None

    @frozen.setter
    def frozen(self, value: bool) -> None:
        if value and self._frozen_at is None:
            self._frozen_at = self.now
        elif not value and self._frozen_at is not None:
            self.leases.extend_all(self.now - self._frozen_at)
            self._frozen_at = None

    def unwoken(self, now: float) -> Unwoken:
        """Nobody is served before its end: the journal hears what a call did before what follows from it."""
        self._unwoken = True
        return Unwoken(self, now)

    def wake(self, now: float) -> None:
        """Answers parked requests of the queues that changed, oldest first."""
        self.now = now
        if self._frozen_at is not None or self._unwoken:
            return
        while self.touched:
            key = min(self.touched)  # not pop: the order of a set differs from process to process
            self.touched.remove(key)
            buckets = self.waiting.buckets(key)
            part = self.partitions.get(key[0]) if buckets else None
            if part is not None and not part.closing:
                queue = part.queues[key[1]]
                if part.sealed and not queue.counts[WAITING]:
                    self._serve_end(key, queue, now)
                else:
                    self._serve(buckets, queue, part.groups.singles, now)

    def _serve(self, buckets: list[Bucket], queue: TaskQueue, singles: bool, now: float) -> None:
        """While rows are ready: the oldest request that they are enough for."""
        stuck: set[int] = set()  # buckets of which the oldest got nothing
        while queue.counts[READY]:
            able = [
                bucket for bucket in buckets
                if bucket and id(bucket) not in stuck
                and queue.ready_units(not (bucket.rows or singles)) >= bucket.needs
            ]  # fmt: skip
            if not able:
                break
            bucket = min(able, key=lambda b: b.oldest)
            if not self._retry(bucket[bucket.oldest], now):
                stuck.add(id(bucket))

    def _serve_end(self, key: QueueKey, queue: TaskQueue, now: float) -> None:
        """Only claimed rows can become ready again: who holds all of these itself waits no more."""
        for request in self.waiting.of_queue(key):
            own = self.leases.held.get((request.partition, request.task, request.owner), 0)
            if (queue.counts[READY] or own == queue.counts[CLAIMED]) and request.key in self.waiting:
                self._retry(request, now)

    def _retry(self, request: ClaimRequest, now: float) -> bool:
        grant = self._attempt(request, pick(request.policy, request.unit, request.group_ids), now)
        if grant is not None:
            self._answer(request, grant)
        return grant is not None

    def _answer(self, request: ClaimRequest, grant: Grant) -> None:
        self.cancel(request.key)
        self.outcomes.append((request.key, grant))
