"""Which replicas of a simulated run fetch versions for their node, and who takes over when one is gone.

Devices are numbered trainer first, then replicas with devices of their own. A node that holds a trainer rank has every
version at its publication; any other node has one mirror, which a replica of it fetches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from mindspeed_asyncflow.config.feasibility import own_replicas
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.workflow.arrivals import Mirror
from mindspeed_asyncflow.workflow.weight_sync import WeightSync

Fetch = Callable[[int, Any], Awaitable[Any]]  # replica, manifest


class Mirrors:
    """`fetch` is called for the replica that fetches. `there`: replicas that are up at the beginning."""

    def __init__(self, config: Config, fetch_s: float, fetch: Fetch, there: Iterable[int]) -> None:
        self._fetch = fetch
        self._node: dict[int, int] = {}  # of replicas that need a mirror
        per_node, ranks = config.cluster.device.devices_per_node, config.trainer.world_size
        for index in range(own_replicas(config) if fetch_s > 0 else 0):
            node = (ranks + index * config.rollout.tensor_parallel) // per_node
            if node > (ranks - 1) // per_node:
                self._node[index] = node
        self._by_node: dict[int, Mirror] = {}
        for index in sorted(there):
            if self._needs(index):
                self._make(index)

    def all(self) -> list[Mirror]:
        return list(self._by_node.values())

    def joined(self, index: int, sync: WeightSync) -> None:
        """A replica is up; if nobody fetches for its node, it does."""
        if self._needs(index):
            sync.replace_mirror(index, self._make(index))

    def lost(self, index: int, sync: WeightSync, left: Iterable[int]) -> None:
        """A replica is gone; if it fetched for its node, another one of those that are `left` does."""
        mirror = self._by_node.get(self._node.get(index, -1))
        if mirror is None or mirror.replicas[0] != index:
            return
        del self._by_node[self._node[index]]
        heir = next((i for i in sorted(left) if self._needs(i) and self._node[i] == self._node[index]), None)
        sync.replace_mirror(index, None if heir is None else self._make(heir))

    def _needs(self, index: int) -> bool:
        return index in self._node and self._node[index] not in self._by_node

    def _make(self, first: int) -> Mirror:
        node = self._node[first]
        others = [i for i in self._node if self._node[i] == node and i != first]
        self._by_node[node] = Mirror(f"node{node}", (first, *others), lambda manifest: self._fetch(first, manifest))
        return self._by_node[node]
