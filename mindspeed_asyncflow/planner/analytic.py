"""Costs from sizes and peaks: what a configuration would take on the hardware of its `cluster` section. Pure.

    training    3 x 2 x weights operations per token (4 x with recomputation: one more forward pass), attention by
                squared lengths, over TP x CP x PP devices; all-reduces of TP, all-to-all of CP and EP on top; a
                pipeline of p stages idles for (p - 1) / virtual micro-batches per chunk
    prefill     2 x weights operations per token over TP devices
    decoding    the longer of reading all weights once and 2 x weights operations per answer; then the cache is read
    weights     bytes over links: every trainer rank writes its share, nodes fetch whole versions, replicas load shards

The formulas are those of Narayanan et al., arXiv 2104.04473 (operations, pipelines), Korthikanti et al., arXiv
2205.05198 (what TP moves), Williams et al., the roofline model (10.1145/1498765.1498785); `docs/planner.md` has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_asyncflow.config.cluster import ClusterConfig, Device
from mindspeed_asyncflow.config.mindspeed import master_bytes
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.work import Work

WIDTH = {"float32": 4, "bfloat16": 2}
LATENCY_S = 20e-6  # of one small collective inside a node
SCORE_ROW_S = 0.0002  # a rule-based reward in one scorer process
CLAIM_S = 0.001


@dataclass(frozen=True, slots=True)
class Speeds:
    """What one device reaches, in operations/s and bytes/s."""

    compute: float
    memory: float
    host: float
    node: float
    network: float
    per_node: int

    @classmethod
    def of(cls, cluster: ClusterConfig, width: int) -> Speeds:
        device: Device = cluster.device
        # float32 products run at half the rate of 2-byte ones; the peak of a CPU preset is that of float32.
        peak = device.tflops * 1e12 * (0.5 if width == 4 and cluster.preset != "cpu" else 1.0)
        link = cluster.link_efficiency * 1e9
        return cls(
            compute=peak * cluster.compute_efficiency,
            memory=device.memory_gbs * 1e9 * cluster.memory_efficiency,
            host=device.host_gbs * link,
            node=device.node_gbs * link,
            network=device.network_gbs * link,
            per_node=device.devices_per_node,
        )

    def link(self, span: int) -> float:
        """Bytes/s of one device in a collective over `span` consecutive devices."""
        return self.node if span <= self.per_node else self.network


def analytic_costs(config: Config, work: Work, reshard_s: float = 0.0) -> Costs:
    """`reshard_s`: of the in-place plan from the trainer's layout to rollout's, for the colocated schedule."""
    cluster, width = config.cluster, WIDTH[config.model.dtype]
    speeds = Speeds.of(cluster, width)
    parts = _rollout(config, work, speeds, width) | _train(config, work, speeds, width)
    parts |= _transfers(config, work, speeds, width, reshard_s)
    if config.algorithm.kl_coef > 0:  # one frozen copy on one device
        parts["forward_token_s"] = 2 * work.active / speeds.compute
        parts["forward_square_s"] = work.square_operations / speeds.compute
    parts["score_row_s"] = SCORE_ROW_S / config.reward.workers
    parts["claim_s"] = CLAIM_S
    scale = config.simulation
    return Costs.of(parts).scaled(scale.rollout_scale, scale.train_scale, scale.transfer_scale)


def _rollout(config: Config, work: Work, speeds: Speeds, width: int) -> dict[str, float]:
    tensor, shape = config.rollout.tensor_parallel, work.shape
    collectives = 2 * shape.layers * (tensor > 1)
    sent = collectives * 2 * (tensor - 1) / tensor * shape.hidden * width / speeds.link(tensor)  # of one token
    return {
        "prefill_token_s": 2 * work.active / (tensor * speeds.compute) + sent,
        "prefill_square_s": work.square_operations / (tensor * speeds.compute),
        "decode_call_s": config.cluster.decode_overhead_s + collectives * LATENCY_S,
        "decode_weights_s": work.dense * width / (tensor * speeds.memory),
        "decode_experts_s": work.experts * width / (tensor * speeds.memory),
        "expert_share": work.expert_share,
        "decode_answer_s": 2 * work.active / (tensor * speeds.compute),
        "decode_context_s": work.cached * width / (work.cache_cut(tensor) * speeds.memory),
        "decode_row_s": sent,
    }


def stage_share(config: Config, work: Work) -> float:
    """What the busiest pipeline rank computes / what the whole model does."""
    t = config.trainer
    active = list(work.layer_active)
    active[-1] += work.vocabulary
    stages = t.pipeline_parallel * (t.virtual_pipeline or 1)
    counts = t.pipeline_layers or [len(active) // stages] * stages
    ranks = [0.0] * t.pipeline_parallel
    start = 0
    for stage, count in enumerate(counts):
        ranks[stage % t.pipeline_parallel] += sum(active[start : start + count])
        start += count
    return max(ranks) / sum(active)


def _train(config: Config, work: Work, speeds: Speeds, width: int) -> dict[str, float]:
    t = config.trainer
    share = stage_share(config, work)
    passes = 4 if t.recompute else 3
    split = t.tensor_parallel * t.context_parallel * speeds.compute / share
    virtual = t.virtual_pipeline or 1
    moved = _train_moves(config, work, speeds, width) * share * passes / 3
    layers = math.ceil(share * work.shape.layers)
    weights = work.dense / t.tensor_parallel + work.experts / (t.tensor_parallel * t.expert_parallel)
    read = passes * share * weights * width / speeds.memory  # each micro-batch reads all weights in every pass
    return {
        "train_token_s": passes * 2 * work.active / split + moved,
        "train_square_s": passes * work.square_operations / split,
        "train_micro_s": read + layers * passes * config.cluster.layer_overhead_s,
        "bubble": (t.pipeline_parallel - 1) / virtual,
        "optimizer_s": _optimizer_s(config, work, speeds, width),
    }


def _train_moves(config: Config, work: Work, speeds: Speeds, width: int) -> float:
    """Seconds of communication per token, forward and backward, if one stage had all layers."""
    t, shape = config.trainer, work.shape
    tp, cp, ep = t.tensor_parallel, t.context_parallel, t.expert_parallel
    row = shape.hidden * width
    # Two all-reduces per layer and pass, forward and backward; each sends and receives 2 (tp - 1) / tp of a row.
    seconds = shape.layers * 4 * 2 * (tp - 1) / tp * row / (cp * speeds.link(tp))
    if t.mindspeed.context_parallel == "ring":
        # Keys and values make cp - 1 hops forward and backward, their gradients in float32 cp; as if nothing of it
        # were beside computation.
        cut: float = 2 * shape.kv_heads * shape.head_dim * (2 * (cp - 1) * width + (cp * 4 if cp > 1 else 0))
    else:  # queries, keys, values and output change places, forward and backward
        cut = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * width * 2 * (cp - 1) / cp
    seconds += shape.layers * cut / (tp * cp * speeds.link(tp * cp))
    if shape.experts is not None:  # to the experts and back, forward and backward
        moe = sum(1 for experts in work.layer_experts if experts)
        sent = moe * 2 * 2 * work.active_experts * (ep - 1) / ep * row
        seconds += sent / (tp * cp * speeds.link(tp * ep))
    if t.pipeline_parallel > 1:
        seconds += 2 * row / (tp * cp * speeds.link(t.world_size))
    return seconds


def _optimizer_s(config: Config, work: Work, speeds: Speeds, width: int) -> float:
    """Gradients over data-parallel ranks, then the update, which is bound by memory."""
    t = config.trainer
    ranks = t.data_parallel * t.context_parallel
    model = t.tensor_parallel * t.pipeline_parallel
    # Weights of this rank, and the ranks that hold the same: of an expert, one in EP ranks.
    held = [(work.dense / model, ranks)]
    held += [(work.experts / (model * t.expert_parallel), max(1, ranks // t.expert_parallel))]
    # float32; scatter and gather cost as much as a reduction
    sent = sum(2 * (copies - 1) / copies * local * 4 for local, copies in held)
    touched = 4 + 16 + 8 + width  # gradient, two moments read and written, master, weight
    updated = sum(local / (copies if t.distributed_optimizer else 1) for local, copies in held)
    span = t.tensor_parallel * t.context_parallel * t.data_parallel
    return sent / speeds.link(span) + updated * touched / speeds.memory


def _transfers(config: Config, work: Work, speeds: Speeds, width: int, reshard_s: float) -> dict[str, float]:
    t, r = config.trainer, config.rollout
    version = work.parameters * width
    trainer_nodes = math.ceil(t.world_size / speeds.per_node)
    rollout_devices = r.replicas * r.tensor_parallel
    rollout_nodes = math.ceil(rollout_devices / speeds.per_node)
    parts = {
        "publish_s": version / (t.world_size * speeds.host),
        "load_s": version / (r.tensor_parallel * speeds.host),
    }
    if config.workflow.schedule == "colocated":
        state = version + work.parameters * (12 + master_bytes(config))  # gradients, moments, masters
        moved = state / (t.world_size * speeds.host)
        return parts | {"give_s": moved + reshard_s, "take_s": moved}
    if t.world_size + rollout_devices > speeds.per_node:
        node = speeds.network * speeds.per_node
        # Each node of rollout receives a version; those of the trainer send them all, each its share.
        parts["fetch_s"] = max(version / node, version * rollout_nodes / (trainer_nodes * node))
    return parts


def calibrated(here: Costs, measured: Costs, there: Costs) -> Costs:
    """Measured costs carried to another configuration: a coefficient changes as the analytic one does between where it
    was measured (`there`) and `here`. One that the analytic model does not know stays as measured; ratios are no times
    and come from the analytic model."""
    new, old, found = here.to_dict(), there.to_dict(), measured.to_dict()
    carried = {n: v * (new[n] / old[n]) if old[n] > 0 else max(v, new[n]) for n, v in found.items()}
    return Costs.of(carried | {name: new[name] for name in ("bubble", "expert_share")})
