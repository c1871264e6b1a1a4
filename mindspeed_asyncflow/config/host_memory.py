"""Host memory of a run on its fullest node, by kind. Estimates err on the low side, so that a refusal is right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mindspeed_asyncflow.config.feasibility import DTYPE_BYTES, in_place, on_npu, own_replicas, sharing_replicas
from mindspeed_asyncflow.config.machine import MIB, Machine
from mindspeed_asyncflow.config.mindspeed import master_bytes
from mindspeed_asyncflow.config.model import ModelShape
from mindspeed_asyncflow.config.schema import Config

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]

# Resident memory of an idle process on CPU, measured with torch 2.13 and vLLM 0.27.
TRAINER_RANK_BYTES = 600 * MIB
REPLICA_BYTES = {"vllm": 1600 * MIB, "reference": 500 * MIB, "simulated": 0}
SHARED = ("dock arena", "weight relay", "weight mirror")  # in /dev/shm


def trainer_nodes(config: Config, machine: Machine) -> int:
    """Nodes that trainer ranks take; 1 where the cluster is one machine."""
    return 1 if machine.nodes == 1 else math.ceil(config.trainer.world_size / config.cluster.device.devices_per_node)


def fullest_node(config: Config, machine: Machine) -> tuple[int, int]:
    """(trainer ranks, replicas) of a node with most versions of the weights. Over several nodes, trainers take the
    first ones, replicas with devices of their own what is left; a replica that lies across nodes counts on each."""
    ranks, replicas = config.trainer.world_size, own_replicas(config) + sharing_replicas(config)
    if machine.nodes == 1:
        return ranks, replicas
    per_node, size = config.cluster.device.devices_per_node, config.rollout.tensor_parallel
    held = min(replicas, max(1, per_node // size))
    if sharing_replicas(config):
        return min(ranks, per_node), held
    beside = (per_node - ranks % per_node) % per_node  # devices that the trainers leave on their last node
    if beside >= size:
        return ranks % per_node, min(replicas, beside // size)
    return 0, held


@dataclass(frozen=True, slots=True)
class _State:
    """Bytes of one trained copy of the model."""

    count: int  # parameters
    experts: int  # of them in routed experts
    width: int
    moments: int  # bytes for each parameter, with what its master takes

    @classmethod
    def of(cls, config: Config, model: ModelShape | None) -> _State:
        experts = model.expert_parameters if model else 0
        width = DTYPE_BYTES[config.model.dtype]
        return cls(model.parameters if model else 0, experts, width, 8 + master_bytes(config))

    def kept(self, config: Config) -> int:
        """Weights, two moments, and what masters take beside bf16 weights, over all trainer ranks: EP ranks share
        experts, the distributed optimizer keeps moments and masters once."""
        t = config.trainer
        copies = t.data_parallel * t.context_parallel
        weights = copies * (self.count - self.experts) + copies // min(copies, t.expert_parallel) * self.experts
        return weights * self.width + (self.count if t.distributed_optimizer else weights) * self.moments


def memory_bytes(config: Config, machine: Machine, model: ModelShape | None) -> dict[str, int]:
    """Least host memory of the fullest node by kind, in bytes; weights only where the model is known (on NPU they live
    on devices)."""
    t, r = config.trainer, config.rollout
    ranks, replicas = fullest_node(config, machine)
    engines = 0 if in_place(config) else replicas  # processes of their own
    parts = {
        "trainer processes": ranks * TRAINER_RANK_BYTES,
        "rollout processes": engines * r.tensor_parallel * REPLICA_BYTES.get(r.engine, REPLICA_BYTES["reference"]),
        "dock arena": config.dock.arena_mb * math.ceil(config.dock.pairs / machine.nodes) * MIB,
    }
    critics = min(config.critic_size, ranks)
    if critics:
        parts["critic processes"] = critics * TRAINER_RANK_BYTES
    state = _State.of(config, model)
    parts |= _versions(config, machine, state.count * state.width, ranks, replicas)
    if config.algorithm.kl_coef > 0:
        parts["reference policy"] = REPLICA_BYTES["reference"] + state.count * state.width
    if sharing_replicas(config):
        kind = "train state on the host, while others have its devices"
        parts[kind] = state.kept(config) * ranks // t.world_size
    if not on_npu(config, machine):
        parts["key/value caches"] = replicas * r.kv_cache_mb * MIB
        parts["rollout weights"] = replicas * state.count * state.width
        trained = t.data_parallel * t.context_parallel * state.count
        each = state.width + state.moments + 4  # fp32 gradients
        parts["trainer weights, gradients, optimizer"] = trained * each
        if critics and model is not None:  # the same without the vocabulary head, which may be tied
            head = 0 if model.tied else model.vocab * model.hidden
            parts["critic weights, gradients, optimizer"] = (
                t.data_parallel * t.context_parallel * (state.count - head) * each
            )
    return parts


def _versions(config: Config, machine: Machine, version: int, ranks: int, replicas: int) -> dict[str, int]:
    """Versions in shared memory: what the ranks of the node write, and what its replicas are fetched from elsewhere."""
    if in_place(config):
        return {"weight relay": 0}
    slots = config.workflow.keep_versions + 1  # one is written
    parts = {"weight relay": slots * version * ranks // config.trainer.world_size}
    if replicas and (trainer_nodes(config, machine) > 1 or not ranks):
        parts["weight mirror"] = slots * version
    return parts


def findings(config: Config, machine: Machine, model: ModelShape | None) -> Iterator[Raw]:
    """What does not fit. Of a cluster that is not here, host memory is an assumption: there it is a warning."""
    if not machine.whole:
        return
    parts = memory_bytes(config, machine, model)
    nodes = machine.nodes
    there = "the machine" if nodes == 1 else f"a node of {nodes}"
    level: Literal["error", "warning"] = "warning" if machine.assumed else "error"
    assumed = "; cluster.host_memory_gb says what a node has" if machine.assumed else ""
    need = sum(parts.values())
    sizes = ("rollout.replicas", "rollout.kv_cache_mb", "trainer.data_parallel")
    keys = (*sizes, "dock.arena_mb", "dock.pairs", "model.source")
    listing = ", ".join(f"{name} {size / MIB:.0f}" for name, size in parts.items() if size)
    text = f"{need / MIB:.0f} MiB of memory wanted ({listing})"
    if need > machine.memory_bytes // nodes:
        yield level, keys, f"{text}, {there} has {machine.memory_bytes // nodes / MIB:.0f}; lower one of these{assumed}"
    elif need > machine.free_memory_bytes // nodes:
        text = f"{text}, {machine.free_memory_bytes // nodes / MIB:.0f} MiB free at the moment"
        yield "warning", keys, f"{text}; end other programs, or lower one of these"
    shared = sum(parts.get(kind, 0) for kind in SHARED)
    free = machine.shm_bytes // nodes
    if shared > free:
        fits = shared < machine.memory_bytes // nodes
        remount = f"mount -o remount,size={math.ceil(shared * 1.05 / 1e9)}G /dev/shm on every node"
        mend = f"; {remount if fits else 'lower one of these'}"
        yield (
            level,
            ("dock.arena_mb", "workflow.keep_versions", "model.source"),
            f"{shared / MIB:.0f} MiB of shared memory wanted, {free / MIB:.0f} free in /dev/shm{mend}",
        )
