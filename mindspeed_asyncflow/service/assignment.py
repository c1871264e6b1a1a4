"""Which process of a run goes to which node of a cluster. Pure.

process                 where
trainer ranks           in order from the first node; a tensor-parallel group is whole in a node, so pipeline and
                        data parallelism cross nodes, and superpods last
critic ranks            the same, behind the trainer
rollout replica         whole in a node, from the last node backwards, away from the trainer
dock pair i             node i, and from the first one again
everything else         anywhere
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from mindspeed_asyncflow.config.feasibility import in_place, needed_replicas, own_replicas, sharing_replicas
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.platforms.topology import Node
from mindspeed_asyncflow.reshard.topology import Topology


def assign(config: Config, nodes: Sequence[Node]) -> dict[str, str]:
    """Ray's id of the node of each process that has one, by its name; none on a single node.

    Raises `PlatformError` where devices are enough in number, but not side by side.
    """
    if len(nodes) < 2:
        return {}
    space, replica = _Space(nodes), config.rollout.tensor_parallel
    blocks = rank_block(config)

    def ranks() -> None:
        space.ranks("trainer", config.trainer.world_size, blocks)
        space.ranks("critic", config.critic_size, config.trainer.tensor_parallel)

    if blocks >= replica:  # the larger blocks first: what is left between them holds smaller ones
        ranks()
    space.replicas(own_replicas(config), replica, needed_replicas(config))
    if blocks < replica:
        ranks()
    home = space.home | {f"dock{i}": nodes[i % len(nodes)].id for i in range(config.dock.pairs)}
    for node in nodes:
        names = ", ".join(name for name, at in home.items() if at == node.id)
        get_logger("service").info("%s has %s", node.ip, names or "nothing of its own")
    return home


def rank_block(config: Config) -> int:
    """Consecutive trainer ranks that share a node: a tensor-parallel group, and those that a replica lives beside."""
    tensor, replica = config.trainer.tensor_parallel, config.rollout.tensor_parallel
    if sharing_replicas(config) and not in_place(config):
        return math.lcm(tensor, replica)
    return tensor


def rank_topology(nodes: Sequence[Node], ranks: Sequence[str]) -> Topology:
    """How trainer ranks lie, from Ray's id of the node of each."""
    number = {node.id: i for i, node in enumerate(nodes)}
    pods = {pod: i for i, pod in enumerate(dict.fromkeys(node.superpod for node in nodes))}
    at = [number[node] for node in ranks]
    return Topology(tuple(at), tuple(pods[nodes[i].superpod] for i in at))


class _Space:
    """Free devices of the nodes while processes take them."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.free = [node.devices for node in nodes]
        self.home: dict[str, str] = {}

    def ranks(self, kind: str, count: int, block: int) -> None:
        """A node for each of `count` ranks, a device each; `block` ranks in a row share one."""
        if count and block > max(node.devices for node in self.nodes):
            said = "no node has %d devices: the %s ranks of a tensor-parallel group lie on several"
            get_logger("service").warning(said, block, kind)
            block = 1
        at = 0  # blocks follow each other, so that neighbours in rank are neighbours in place
        for first in range(0, count, block):
            members = range(first, min(first + block, count))
            at = self._take([f"{kind}{i}" for i in members], len(members), range(at, len(self.nodes)), range(at))

    def replicas(self, count: int, size: int, needed: int) -> None:
        """A node for each of `count` replicas with `size` devices; those from `needed` on may go without."""
        backwards = range(len(self.nodes) - 1, -1, -1)
        for i in range(count):
            if i >= needed and size > max(self.free):
                return
            self._take([f"rollout{i}"], size, backwards)

    def _take(self, names: Sequence[str], devices: int, *order: Sequence[int]) -> int:
        """The first node of `order` with so many free devices becomes the home of `names`."""
        for node in itertools.chain(*order):
            if self.free[node] >= devices:
                self.free[node] -= devices
                self.home |= dict.fromkeys(names, self.nodes[node].id)
                return node
        raise PlatformError(self._no_room(names[0], devices))

    def _no_room(self, name: str, size: int) -> str:
        left = ", ".join(f"{node.ip}: {free} of {node.devices}" for node, free in zip(self.nodes, self.free))
        return (
            f"{name} wants {size} devices of one node, free are {left}; lower rollout.tensor_parallel or "
            "trainer.tensor_parallel, or give nodes more devices"
        )
