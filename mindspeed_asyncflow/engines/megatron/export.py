"""Full Hugging Face tensors out of the shards of all ranks, in layer order.

The list of tensors is agreed on once; after that an export is tensor collectives only (and none at all on one rank).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_asyncflow.platforms.experts import is_grouped, parts


@dataclass(frozen=True, slots=True)
class ExportEntry:
    """One megatron parameter, the same on all ranks of its pipeline stage."""

    name: str  # with the global layer number, experts counted inside their expert-parallel rank
    local_name: str  # in its model chunk
    stage: int  # pipeline rank that holds it
    chunk: int  # model chunk there
    shape: tuple[int, ...]  # of one shard
    split: bool  # over tensor-parallel ranks
    partition_dim: int  # the split dimension; -1: none
    expert: bool
    trained: bool  # false: a float32 buffer that belongs to the weights

    @property
    def tensor_model_parallel(self) -> bool:  # the name under which mbridge asks for it
        return self.split


def _order(name: str) -> tuple[int, int, str]:
    layer = re.search(r"decoder\.layers\.(\d+)\.", name)
    if layer:
        return (1, int(layer.group(1)), "")
    return (0, 0, "") if name.startswith("embedding") else (2, 0, name)


def held_weights(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of a model chunk, each expert's by itself, and the corrections of expert scores, which megatron keeps
    as buffers."""
    held: dict[str, torch.Tensor] = {}
    for name, param in chunk.named_parameters():
        held.update(parts(name, param) if is_grouped(name) else {name: param})
    return held | {name: buffer for name, buffer in chunk.named_buffers() if is_correction(name)}


def gradient(weight: Any) -> torch.Tensor:
    """The sums of gradients that belong to one of `held_weights` and are kept in the buffers of data parallelism."""
    whole, start = getattr(weight, "whole", weight), getattr(weight, "start", 0)
    return whole.main_grad.view(-1)[start : start + weight.numel()].view(weight.shape)


def is_correction(name: str) -> bool:
    """Whether a weight is a buffer that no gradient changes."""
    return name.endswith("router.expert_bias")


def plan_export(bridge: Any, chunks: Sequence[torch.nn.Module]) -> list[ExportEntry]:
    """All parameters of the model in layer order; collective over the pipeline group. A tied output layer on the last
    stage repeats the embedding and is left out."""
    mine = []
    for i, chunk in enumerate(chunks):
        names = bridge._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=False)
        for local, param in held_weights(chunk).items():
            mine.append(
                ExportEntry(
                    name=names[local],
                    local_name=local,
                    stage=bridge.mpu.pp_rank,
                    chunk=i,
                    shape=tuple(param.shape),
                    split=bool(getattr(param, "tensor_model_parallel", False)),
                    partition_dim=int(getattr(param, "partition_dim", -1)),
                    expert=".mlp.experts." in names[local],
                    trained=not is_correction(local),
                )
            )
    stages: list[Any] = [None] * bridge.mpu.pp_size
    dist.all_gather_object(stages, mine, group=bridge.mpu.pp_group)
    entries = sorted((e for stage in stages for e in stage), key=lambda e: _order(e.name))
    seen: set[str] = set()
    plan = []
    for entry in entries:
        hf_name = bridge._weight_name_mapping_mcore_to_hf(entry.name)[0]
        if hf_name not in seen:
            seen.add(hf_name)
            plan.append(entry)
    return plan


def _gather(tensor: torch.Tensor, group: Any, size: int) -> list[torch.Tensor]:
    if size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


@torch.no_grad()
def export_tensors(
    bridge: Any, shards: Sequence[Mapping[str, torch.Tensor]], plan: Sequence[ExportEntry]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor on the host, contiguous and owned by the caller). Collective over all ranks.

    `shards` holds, for each model chunk, a tensor per local parameter name: the parameters, or anything of the same
    shapes and one data type, such as the gradients of the trained ones.
    """
    mpu = bridge.mpu
    like = next(iter(shards[0].values()))
    for entry in plan:
        if entry.stage == mpu.pp_rank:
            shard = shards[entry.chunk][entry.local_name].detach()
        else:
            dtype = like.dtype if entry.trained else torch.float32
            shard = torch.empty(entry.shape, dtype=dtype, device=like.device)
        if mpu.pp_size > 1:
            shard = shard.contiguous()
            dist.broadcast(shard, src=dist.get_global_rank(mpu.pp_group, entry.stage), group=mpu.pp_group)
        if entry.expert:
            for rank, part in enumerate(_gather(shard, mpu.ep_group, mpu.ep_size)):
                name = global_name(bridge, entry.name, rank)
                parts = _gather(part, mpu.etp_group, mpu.etp_size)
                yield from _to_hf(bridge, name, bridge._weight_merge_across_tp(name, parts, entry))
        elif entry.split and mpu.tp_size > 1:
            parts = _gather(shard, mpu.tp_group, mpu.tp_size)
            yield from _to_hf(bridge, entry.name, bridge._weight_merge_across_tp(entry.name, parts, entry))
        else:
            yield from _to_hf(bridge, entry.name, shard)


def global_name(bridge: Any, name: str, ep_rank: int) -> str:
    """`name` of an expert of expert-parallel rank `ep_rank`, counted over all ranks; other names stay."""
    if ".mlp.experts." not in name:
        return name
    head, expert = name.rsplit("weight", 1)
    return f"{head}weight{int(expert) + ep_rank * bridge.config.num_moe_experts // bridge.mpu.ep_size}"


def _to_hf(bridge: Any, name: str, full: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for hf_name, tensor in zip(*bridge._weight_to_hf_format(name, full)):
        yield hf_name, tensor.to("cpu", copy=True).contiguous()
