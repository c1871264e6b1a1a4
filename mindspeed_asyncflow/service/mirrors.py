"""Which replica fetches weight versions to a node where replicas cannot map the trainers' relay.

The first replica of a node fetches for all of them that run there. When its process dies another one takes over with a
mirror of its own; when none can, the replicas of that node cannot get weights any more and leave.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.config.schema import WorkflowConfig
from mindspeed_asyncflow.errors import WeightSyncError, WorkerLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.service.cleanup import shm_path
from mindspeed_asyncflow.service.relays import Place, Relays
from mindspeed_asyncflow.workflow.arrivals import Mirror
from mindspeed_asyncflow.workflow.weight_sync import WeightSync
from mindspeed_asyncflow.workflow.workers import MirrorRoute

NOBODY = -1


@dataclass(slots=True)
class _Node:
    place: Place
    members: list[int]  # the first one fetches
    mirror: Mirror
    path: str


class Mirrors:
    """`workers`: the replicas that are up, by index, kept by the caller. `serve` starts the relay servers beside the
    trainer ranks: (address to listen on, secret) by rank -> their addresses. `sync`: told of changes, once it is there.
    """

    def __init__(
        self,
        relays: Relays,
        workflow: WorkflowConfig,
        workers: Mapping[int, Any],
        serve: Callable[[Mapping[int, str], bytes], Awaitable[Sequence[str]]],
    ) -> None:
        self.relays, self.workflow, self.workers = relays, workflow, workers
        self.sync: WeightSync | None = None
        self._serve = serve
        self._secret = secrets.token_bytes(16)
        self._sources: tuple[str, ...] = ()
        self._nodes: dict[int, _Node] = {}  # by the replica that fetches
        self._changing = asyncio.Lock()

    def all(self) -> list[Mirror]:
        return [node.mirror for node in self._nodes.values()]

    async def need(self, index: int, places: Mapping[int, Place]) -> None:
        """Replica `index` is up and needs a way to weights. `places`: of the replicas, also of those that may yet come:
        whoever runs on its node loads through its mirror."""
        place = places[index]
        async with self._changing:
            known = {i for node in self._nodes.values() for i in node.members}
            if self.relays.maps(place) or index in known:
                return
            beside = [i for i, other in places.items() if other.node == place.node and i != index and i not in known]
            await self._take(place, [index, *beside])

    async def lost(self, index: int) -> list[int]:
        """The process of replica `index` is dead. Returns the replicas that have no way to weights any more. One that
        comes back loads through the mirror of its node, as long as there is one."""
        async with self._changing:
            dead = self._nodes.pop(index, None)
            if dead is None:
                return []
            Path(dead.path).unlink(missing_ok=True)
            left = [i for i in dead.members if i != index]
            others, absent = ([i for i in left if (i in self.workers) is up] for up in (True, False))
            for heir in others:
                try:
                    await self._take(dead.place, [heir, *(i for i in others if i != heir), *absent, index], index)
                except (WorkerLost, WeightSyncError) as error:
                    get_logger("service").warning("rollout%d cannot fetch weights for its node: %s", heir, error)
                    continue
                said = "rollout%d fetches weights for node %s in the place of rollout%d"
                get_logger("service").warning(said, heir, dead.place.ip, index)
                return []
            if self.sync is not None:
                self.sync.replace_mirror(index, None)
            return others

    async def _take(self, place: Place, members: list[int], instead_of: int = NOBODY) -> None:
        """The first of `members` fetches for all of them from now on."""
        if not self._sources:
            self._sources = tuple(await self._serve(self.relays.servers, self._secret))
        w, first = self.workflow, members[0]
        silence_s = w.watchdog_s / 2  # says more than the watchdog, so it comes first
        path = shm_path(f"mirror-{secrets.token_hex(4)}")  # never one that a process may still have open
        route = MirrorRoute(path, self._sources, self._secret, w.keep_versions, silence_s, w.relay_delta)
        worker = self.workers[first]
        await worker.use_mirror(route)
        mirror = Mirror(place.ip, tuple(members), worker.fetch)
        self._nodes[first] = _Node(place, members, mirror, path)
        if self.sync is not None:
            self.sync.replace_mirror(instead_of, mirror)
