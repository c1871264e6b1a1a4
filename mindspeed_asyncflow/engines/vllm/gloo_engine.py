"""`hccl` where there are no NPUs: vllm-ascend's weight-transfer engine of that name, carried by gloo between CPUs.

Names, fields, rank arithmetic, bucket rule and life cycle are those of vllm-ascend's engine, so that adapter and sender
are the same on both platforms; the transport is not. Every worker process registers it (`transfer.py`).
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

DEADLINE = timedelta(seconds=120)  # to meet, and for one bucket; a peer that dies is noticed at once


class GlooGroup:
    """What `PyHcclCommunicator` offers to a transfer: broadcasts in a group of its own, outside torch's default one."""

    disabled = False

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=DEADLINE)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = DEADLINE
        alone = ipaddress.ip_address(address).is_loopback  # all ranks are on this machine
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=address)
            if alone
            else dist.ProcessGroupGloo.create_default_device()
        ]
        self._group = dist.ProcessGroupGloo(store, rank, world_size, options)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Where rank 0, the sender, listens, and which ranks the workers of this engine have."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """What will be broadcast, in order; buckets follow from the sizes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2


def buckets(sizes: Iterable[int], most: int) -> Iterator[list[int]]:
    """Indices of the tensors of each bucket: a bucket ends with the tensor that makes it larger than `most` bytes."""
    bucket: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        bucket.append(index)
        filled += size
        if filled > most:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


class GlooEngine(WeightTransferEngine[GlooInit, GlooUpdate]):
    """Receives one version as packed broadcasts and reloads the model layer by layer."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.group = GlooGroup(
            init_info.master_address, init_info.master_port, worker + init_info.rank_offset, init_info.world_size
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdate, load_weights: Callable[..., Any] | None = None) -> None:
        """Up to 0.26 vLLM's worker runs the reload itself and hands `load_weights` in."""
        assert self.group is not None and update_info.packed, "the sender is met first, and packs"
        load: Callable[..., Any] = load_weights or self.model.load_weights  # type: ignore[assignment]
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [math.prod(shape) * d.itemsize for shape, d in zip(update_info.shapes, dtypes, strict=True)]
        for bucket in buckets(sizes, update_info.packed_buffer_size_bytes):
            packed = torch.empty(sum(sizes[i] for i in bucket), dtype=torch.uint8)
            self.group.broadcast(packed, src=0)
            parts = packed.split([sizes[i] for i in bucket])
            load(
                [
                    (update_info.names[i], part.clone().view(dtypes[i]).view(update_info.shapes[i]))
                    for i, part in zip(bucket, parts, strict=True)
                ]
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None

    @staticmethod
    def trainer_init(init_info: dict[str, Any]) -> GlooGroup:
        return GlooGroup(init_info["master_address"], init_info["master_port"], 0, init_info["world_size"])

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]) -> None:
        assert trainer_args["packed"], "receivers unpack"
        group, most = trainer_args["group"], trainer_args["packed_buffer_size_bytes"]
        bucket: list[torch.Tensor] = []
        for _, tensor in iterator:
            bucket.append(tensor.contiguous().view(-1).view(torch.uint8))
            if sum(map(len, bucket)) > most:
                group.broadcast(torch.cat(bucket), src=0)
                bucket = []
        if bucket:
            group.broadcast(torch.cat(bucket), src=0)


def register() -> None:
    """Put it where vllm-ascend's plugin puts its engine."""
    if "hccl" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("hccl", GlooEngine)
