"""Parked claims: who waits for what, who is next, and whose time is over. No question looks at all of them.

Requests that differ only in asker and `count` share a bucket: when the oldest of a bucket cannot be served, none of it
can. So a change of a queue looks at the oldest of each bucket.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from mindspeed_asyncflow.dock.partition import ClaimRequest

QueueKey = tuple[str, str]  # partition, task


class Bucket(dict[int, ClaimRequest]):
    """Requests by number of arrival, oldest first."""

    def __init__(self, example: ClaimRequest) -> None:
        super().__init__()
        self.rows = example.unit == "rows"
        self.needs = example.needs

    @property
    def oldest(self) -> int:
        return next(iter(self))


class Waiting:
    def __init__(self) -> None:
        self._queues: dict[QueueKey, dict[tuple, Bucket]] = {}
        self._by_key: dict[object, tuple[int, ClaimRequest]] = {}
        self._heap: list[tuple[float, int, object]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[ClaimRequest]:
        return (request for _, request in self._by_key.values())

    def park(self, request: ClaimRequest) -> None:
        number = next(self._numbers)
        buckets = self._queues.setdefault((request.partition, request.task), {})
        name = _bucket_name(request)
        if name not in buckets:
            buckets[name] = Bucket(request)
        buckets[name][number] = request
        self._by_key[request.key] = (number, request)
        heapq.heappush(self._heap, (request.deadline, number, request.key))
        if len(self._heap) > 2 * len(self._by_key) + 1024:  # most were answered long before their deadline
            self._heap = [(r.deadline, n, key) for key, (n, r) in self._by_key.items()]
            heapq.heapify(self._heap)

    def remove(self, key: object) -> ClaimRequest | None:
        """The request is answered, or its asker is gone."""
        number, request = self._by_key.pop(key, (-1, None))
        if request is not None:
            queue = (request.partition, request.task)
            buckets, name = self._queues[queue], _bucket_name(request)
            del buckets[name][number]
            if not buckets[name]:
                del buckets[name]
                if not buckets:
                    del self._queues[queue]
        return request

    def buckets(self, queue: QueueKey) -> list[Bucket]:
        return list(self._queues.get(queue, {}).values())

    def of_queue(self, queue: QueueKey) -> list[ClaimRequest]:
        """All that wait for a queue, oldest first."""
        found = [item for bucket in self._queues.get(queue, {}).values() for item in bucket.items()]
        return [request for _, request in sorted(found, key=lambda item: item[0])]

    def run_out(self, now: float) -> list[ClaimRequest]:
        """Takes out the requests whose deadline has come."""
        out = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            request = self.remove(heapq.heappop(self._heap)[2])
            if request is not None:
                out.append(request)
        return out

    def next_deadline(self) -> float | None:
        while self._heap:
            deadline, number, key = self._heap[0]
            if self._by_key.get(key, (-1,))[0] == number:
                return deadline
            heapq.heappop(self._heap)
        return None


def _bucket_name(r: ClaimRequest) -> tuple:
    listed = None if r.group_ids is None else tuple(r.group_ids)
    team = (r.team, r.ranks, r.split, r.count) if r.team else None
    return r.unit, r.at_least, r.policy, r.min_version, r.max_age_s, listed, team
