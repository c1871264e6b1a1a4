"""Which HCCL groups a run has, and over which links their members talk: the plan that is checked before a launch. Pure.

Ranks fill nodes in order, as `service/assignment.py` places them, and count as megatron counts: tensor fastest, then
context, data, pipeline. What lies inside a node goes over HCCS; between nodes it goes over HCCS inside a superpod and
over RoCE between superpods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_asyncflow.config.feasibility import in_place, own_replicas, sharing_replicas
from mindspeed_asyncflow.config.schema import Config, TrainerConfig


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of one kind: `count` of them with `size` members each, the widest over `nodes` nodes."""

    kind: str
    count: int
    size: int
    nodes: int

    def __str__(self) -> str:
        where = "inside a node, HCCS" if self.nodes == 1 else f"over {self.nodes} nodes, HCCS in a superpod, else RoCE"
        return f"{self.kind}: {self.count} x {self.size} devices {where}"


def hccl_groups(config: Config, devices_per_node: int) -> list[Groups]:
    """Groups of more than one member, of trainer, critic, replicas and weights on their way, in this order."""
    found = list(_of_ranks("trainer", config.trainer, 0, devices_per_node))
    if config.critic_size:  # cut as the trainer is
        found += _of_ranks("critic", config.trainer, config.trainer.world_size, devices_per_node)
    size = config.rollout.tensor_parallel
    replicas = own_replicas(config) + (0 if in_place(config) else sharing_replicas(config))
    if size > 1 and replicas:
        found.append(Groups("rollout tensor", replicas, size, -(-size // devices_per_node)))
    if config.rollout.native:  # the first one may be on another node
        found.append(Groups("weights to a replica", replicas, 1 + size, 1 + -(-size // devices_per_node)))
    if in_place(config) and config.trainer.world_size > 1:
        ranks = range(config.trainer.world_size)
        found.append(Groups("weights in place", 1, len(ranks), _nodes(ranks, 0, devices_per_node)))
    return found


def _of_ranks(side: str, trainer: TrainerConfig, first: int, devices_per_node: int) -> Iterator[Groups]:
    tensor, context = trainer.tensor_parallel, trainer.context_parallel
    for kind, size, stride in (
        ("tensor", tensor, 1),
        ("context", context, tensor),
        ("data", trainer.data_parallel * context, tensor),  # gradients are summed over both
        ("expert", trainer.expert_parallel, tensor),
        ("pipeline", trainer.pipeline_parallel, trainer.world_size // trainer.pipeline_parallel),
    ):
        if size > 1:
            starts = [rank for rank in range(trainer.world_size) if rank // stride % size == 0]
            widest = max(_nodes(range(r, r + size * stride, stride), first, devices_per_node) for r in starts)
            yield Groups(f"{side} {kind}", len(starts), size, widest)


def _nodes(ranks: Sequence[int], first: int, devices_per_node: int) -> int:
    return len({(first + rank) // devices_per_node for rank in ranks})
