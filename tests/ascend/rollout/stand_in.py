"""A weight-transfer engine with the interface of vllm-ascend's `npu_ipc`, over host memory.

Written from that interface: names, fields and life cycle are its, the transport is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from mindspeed_asyncflow.engines.vllm import gloo_engine


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
    """Put it, and what stands for `hccl` on CPUs, where vllm-ascend's plugin puts its engines."""
    gloo_engine.register()
    if "npu_ipc" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("npu_ipc", SharedEngine)
