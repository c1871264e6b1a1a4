"""Trainer side of vllm-ascend's own weight transfer: what broadcasts over HCCL, and what hands out device memory.

Both run where vllm-ascend is installed, so not in a trainer rank whose environment lacks it, but in a process beside
it (`send_worker.py`): weights are any (name, tensor) pairs on the sender's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from mindspeed_asyncflow.engines.vllm.guards import check_bucket
from mindspeed_asyncflow.engines.vllm.native import BUFFERS, NativeTransfer, Rendezvous
from mindspeed_asyncflow.engines.vllm.receipt import RECEIPT, with_receipt
from mindspeed_asyncflow.errors import PlatformError, WeightSyncError
from mindspeed_asyncflow.records import WeightManifest

Tensors = Iterable[tuple[str, torch.Tensor]]


def load_engines(platform: str) -> None:
    """Register the transfer engines of this process's platform with vLLM."""
    if platform == "cpu":
        from mindspeed_asyncflow.engines.vllm import gloo_engine

        gloo_engine.register()
        return
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def _registered(backend: str) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        return WeightTransferEngineFactory._registry[backend]()
    except KeyError:
        raise PlatformError(
            f"no weight transfer {backend!r} is registered in this process: vllm-ascend is not installed, or its "
            "plugins were not loaded (vllm.plugins.load_general_plugins)"
        ) from None


def in_order(manifest: WeightManifest, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensors`, which must be those of the manifest in its order, dtype and shape: receivers allocate by it.

    Raises `WeightSyncError` at the first that is not. Receivers of a broadcast then wait for what never comes, until
    their own deadline.
    """
    expected = iter(manifest.params)
    for name, tensor in tensors:
        if name == RECEIPT:
            yield name, tensor
            continue
        param = next(expected, None)
        given = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        wanted = None if param is None else (param.name, param.dtype, param.shape)
        if given != wanted:
            raise WeightSyncError(f"weight version {manifest.version}: {given} is sent where receivers expect {wanted}")
        yield name, tensor
    left = next(expected, None)
    if left is not None:
        raise WeightSyncError(f"weight version {manifest.version}: {left.name!r} is not among what is sent")


class HcclSender:
    """Rank 0 of one group. The constructor returns when all workers of its replica have joined."""

    def __init__(self, rendezvous: Rendezvous, bucket_bytes: int) -> None:
        self._engine, self._bucket_bytes = _registered("hccl"), bucket_bytes
        self._group = self._engine.trainer_init(
            {
                "master_address": rendezvous.address,
                "master_port": rendezvous.port,
                "world_size": rendezvous.world_size,
            }
        )
        if getattr(self._group, "disabled", False):  # it would send nothing and say nothing
            raise PlatformError("HCCL's library cannot be loaded by the sender of weights: source CANN's set_env.sh")

    def send(self, manifest: WeightManifest, tensors: Tensors, valid: Callable[[], bool] = lambda: True) -> None:
        """Broadcast one version, and its receipt, to the replica, which must be receiving it.

        `valid` says, when all tensors have been taken, whether they were what they should be; see `with_receipt`.
        """
        pairs = with_receipt(in_order(manifest, tensors), manifest.version, manifest.fingerprint, valid)
        self._engine.trainer_send_weights(
            pairs,
            {
                "group": self._group,
                "packed": True,
                "packed_buffer_size_bytes": self._bucket_bytes,
                "packed_num_buffers": BUFFERS,
            },
        )


class IpcSender:
    """Gives handles of this process's device memory to workers on the same devices. Collective over the ranks of the
    sending process group, each on its own device."""

    def __init__(self, transfer: NativeTransfer, rank: int = 0) -> None:
        self._transfer, self._rank = transfer, rank

    def send(self, manifest: WeightManifest, tensors: Tensors, deliver: Callable[[dict[str, Any]], None]) -> None:
        """`deliver` takes a message to the replica (rank 0 only) and returns when it has loaded it. Unpacked, all
        tensors are on the device at once. Raises `WeightSyncError` for one that is larger than a bucket."""
        if self._transfer.packed:
            check_bucket(manifest, self._transfer.bucket_bytes)
        pairs = with_receipt(in_order(manifest, tensors), manifest.version, manifest.fingerprint)
        if self._transfer.shape.ipc_sender == "factory":
            self._send_by_factory(pairs, deliver)
            return
        _registered("npu_ipc").trainer_send_weights(
            pairs,
            {
                "send_mode": lambda update: deliver(asdict(update)),
                "packed": self._transfer.packed,
                "packed_buffer_size_bytes": self._transfer.bucket_bytes,
            },
        )

    def _send_by_factory(self, pairs: Any, deliver: Callable[[dict[str, Any]], None]) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm_ascend.distributed.weight_transfer.npu_ipc_engine import NPUIPCTrainerInitInfo

        info = NPUIPCTrainerInitInfo(rank=self._rank, packed=self._transfer.packed)
        WeightTransferTrainerFactory.trainer_init(info, client=_Deliver(deliver), source=pairs).send_weights()


class _Deliver:
    """vLLM's control plane of a weight sync, of which the replica's `receive` already does all but the update."""

    def __init__(self, deliver: Callable[[dict[str, Any]], None]) -> None:
        self.update_weights = deliver

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The replica has joined."""

    def start_weight_update(self) -> None:
        """The replica has started."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The replica finishes when it has all messages."""
