"""Plans for DeepSeek-R1-671B over 384 ranks: seconds to make them, and bytes over links of stated speed. No device.

Multi-token-prediction layers are not part of the policy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.config.model import ModelShape, describe
from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel
from mindspeed_asyncflow.reshard.boxes import matrix_shape
from mindspeed_asyncflow.reshard.cost import LinkSpeeds, modelled_seconds
from mindspeed_asyncflow.reshard.layout import Layout
from mindspeed_asyncflow.reshard.plan import Plan, make_plan
from mindspeed_asyncflow.reshard.rollout_layout import rollout_layout
from mindspeed_asyncflow.reshard.topology import Topology
from mindspeed_asyncflow.reshard.train_layout import train_layout
from tests.reshard.models import DEEPSEEK_R1

ITEM_BYTES = 2  # bfloat16
BUCKET_BYTES = 1 << 30
RANKS_PER_NODE = 16  # dies: 8 Ascend 910C packages of two dies
GB = 1e9

# One direction of one rank, i.e. one die. Zuo et al., "Serving Large Language Models on Huawei CloudMatrix384"
# (arXiv 2506.12708): 392 GB/s over the unified bus and 400 Gbit/s over RDMA for each 910C package of two dies, 3.2 TB/s
# of memory bandwidth for each package. A copy reads and writes. The latency of a message is our assumption.
SPEEDS = LinkSpeeds(node=196 * GB, superpod=196 * GB, roce=25 * GB, copy=800 * GB, latency_s=20e-6)
ASSUMPTIONS = (
    "a rank is one die of an Ascend 910C, 16 to a node, 384 in one superpod; bf16; buckets of 1 GiB",
    "unified bus 392 GB/s per package = 196 GB/s per die and direction, inside and between nodes (arXiv 2506.12708)",
    "RDMA 400 Gbit/s per package = 25 GB/s per die and direction, between superpods (arXiv 2506.12708)",
    "memory 3.2 TB/s per package = 0.8 TB/s of copy per die (arXiv 2506.12708); 20 us for each message (ours)",
    "links do not disturb each other; steps and buckets do not overlap; a rank sends and receives at the same time",
)

_LAYERS_12, _LAYERS_16 = (6, *[5] * 11), (*[4] * 13, *[3] * 3)


@dataclass(frozen=True)
class Variant:
    train: TrainParallel
    rollout: RolloutParallel
    apart: bool = False  # rollout on a superpod of its own, over RDMA

    def __str__(self) -> str:
        return f"{self.train} -> {self.rollout}{', over RDMA' if self.apart else ''}"


_SERVE = RolloutParallel(tensor=4, data=16, expert=True, replicas=6)
_PP12 = TrainParallel(tensor=8, pipeline=12, data=4, expert=32, expert_tensor=1, pipeline_layers=_LAYERS_12)
_PP16 = TrainParallel(tensor=8, pipeline=16, data=3, expert=8, expert_tensor=1, pipeline_layers=_LAYERS_16)
VARIANTS = (Variant(_PP12, _SERVE), Variant(_PP16, _SERVE), Variant(_PP12, _SERVE, apart=True))


def measure(variant: Variant) -> dict[str, Any]:
    """Make layouts and plan, check every byte, model its time. Raises `AssertionError` for a byte too many or few."""
    model = describe(DEEPSEEK_R1)
    began = time.monotonic()
    source, target = train_layout(model, variant.train), rollout_layout(model, variant.rollout)
    first = source.world_size if variant.apart else 0
    world = max(source.world_size, first + target.world_size)
    plan = make_plan(
        source, target, itemsize=ITEM_BYTES, bucket_bytes=BUCKET_BYTES, target_first=first, across_stages=True,
        topology=Topology.regular(world, RANKS_PER_NODE, source.world_size // RANKS_PER_NODE),
    )  # fmt: skip
    seconds = time.monotonic() - began
    wanted = [target.rank_bytes(rank, ITEM_BYTES) for rank in range(target.world_size)]
    arriving = (plan.received_bytes() + plan.copied_bytes())[first:]
    assert arriving.tolist() == wanted, "a rank does not get exactly what its layout has"
    assert sum(plan.link_bytes().values()) == sum(wanted), "bytes per link do not add up"
    assert int(plan.peak_bucket_bytes().max()) <= BUCKET_BYTES
    return {
        "name": str(variant), "apart": variant.apart, "seconds": seconds, "modelled_s": modelled_seconds(plan, SPEEDS),
        "over": plan.over_lower_bound(), "links": plan.link_bytes(), "buckets": plan.buckets, "moves": len(plan.bucket),
        "naive_over_ours": naive_bytes(model, source, target, first) / moved_bytes(plan),
        "busiest_gb": float(np.maximum(plan.sent_bytes(), plan.received_bytes()).max()) / GB,
    }  # fmt: skip


def moved_bytes(plan: Plan) -> int:
    """Bytes that leave a rank."""
    return int(plan.sent_bytes().sum())


def naive_bytes(model: ModelShape, source: Layout, target: Layout, first: int) -> int:
    """What the plain allgather moves: every generating rank gathers all tensors in full, tensor by tensor, and keeps
    its part. Sum over ranks of (bytes of the model - bytes of its own train shard)."""
    full = sum(rows * cols for rows, cols in (matrix_shape(t.shape) for t in model.tensors().values()))
    total = 0
    for rank in range(first, first + target.world_size):
        own = 0
        if rank < source.world_size:
            # a tied embedding lies twice on a rank that is first and last stage; it counts once
            own = sum(box.size for _, box in {(s.name, s.box) for p in source.ranks[rank] for s in p.segments})
        total += (full - own) * ITEM_BYTES
    return total
