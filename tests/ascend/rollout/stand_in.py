"""Weight-transfer engines with the interface of vllm-ascend's `hccl` and `npu_ipc`, over gloo and over host memory.

Written from that interface: names, fields, rank arithmetic, bucket rule and life cycle are its, the transport is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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

DEADLINE = timedelta(seconds=60)


class GlooGroup:
    """What `PyHcclCommunicator` offers to a transfer: broadcasts in a group of its own, outside torch's default one."""

    disabled = False

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=DEADLINE)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, DEADLINE)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()


@dataclass
class Init(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class Update(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2


def buckets(sizes: list[int], most: int) -> Iterator[range]:
    """Indices of the tensors of each bucket: a bucket ends with the tensor that makes it larger than `most`."""
    start, filled = 0, 0
    for index, size in enumerate(sizes):
        filled += size
        if filled > most:
            yield range(start, index + 1)
            start, filled = index + 1, 0
    if start < len(sizes):
        yield range(start, len(sizes))


class GlooEngine(WeightTransferEngine[Init, Update]):
    """`hccl`."""

    init_info_cls = Init
    update_info_cls = Update
    group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: Init) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.group = GlooGroup(
            init_info.master_address, init_info.master_port, worker + init_info.rank_offset, init_info.world_size
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        assert self.group is not None and update_info.packed
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [math.prod(shape) * d.itemsize for shape, d in zip(update_info.shapes, dtypes, strict=True)]
        for bucket in buckets(sizes, update_info.packed_buffer_size_bytes):
            packed = torch.empty(sum(sizes[i] for i in bucket), dtype=torch.uint8)
            self.group.broadcast(packed, src=0)
            parts = packed.split([sizes[i] for i in bucket])
            self.model.load_weights(  # type: ignore[operator]
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
        assert trainer_args["packed"] and trainer_args["packed_num_buffers"] == 2
        flat = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in iterator]
        for bucket in buckets([len(f) for f in flat], trainer_args["packed_buffer_size_bytes"]):
            trainer_args["group"].broadcast(torch.cat([flat[i] for i in bucket]), src=0)


@dataclass
class NoInit(WeightTransferInitInfo):
    packed: bool = False


@dataclass
class Handles(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    ipc_handles: list[dict[str, Any]]
    tensor_sizes: list[int] | None = None


class SharedEngine(WeightTransferEngine[NoInit, Handles]):
    """`npu_ipc` of 0.27: nobody prepares the model for a reload; a handle is the tensor itself, of this process."""

    init_info_cls = NoInit
    update_info_cls = Handles

    def init_transfer_engine(self, init_info: NoInit) -> None:
        assert not init_info.packed

    def start_weight_update(self) -> None:
        """As there: nothing."""

    def receive_weights(self, update_info: Handles) -> None:
        weights = [(name, handle["chip"]) for name, handle in zip(update_info.names, update_info.ipc_handles)]
        self.model.load_weights(weights)  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        """As there: nothing."""

    def shutdown(self) -> None:
        """Nothing is kept."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any]) -> None:
        raise NotImplementedError


def register() -> None:
    """Put the stand-ins where vllm-ascend's plugin puts its engines."""
    for name, engine in (("hccl", GlooEngine), ("npu_ipc", SharedEngine)):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, engine)
