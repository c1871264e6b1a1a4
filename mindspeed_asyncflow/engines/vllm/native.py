"""Rollout side of vllm-ascend's own weight transfer, `hccl` and `npu_ipc`, over the verbs of every release.

sender (sender.py)                       workers of a replica
  HCCL group: rank 0                       ranks 1 ... of the group
  broadcasts buckets, then the receipt ─►  start_weight_update, update_weights, finish_weight_update
                                           native_close: the receipt against what reached the model
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mindspeed_asyncflow.engines.vllm.receipt import RECEIPT, RECEIPT_DTYPE, receipt_shape
from mindspeed_asyncflow.engines.vllm.versions import AscendShape
from mindspeed_asyncflow.errors import EngineError, WeightSyncError
from mindspeed_asyncflow.records import WeightManifest

BUFFERS = 2  # buckets in flight; sender and receivers must agree
Rpc = Callable[..., list[Any]]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """One HCCL group: its sender, which is rank 0 and listens at `address`:`port`, and the workers of its replica.

    A group for each replica, so that each loads at its own boundary and one that dies leaves the others alone.
    """

    address: str
    port: int
    workers: int  # tensor x pipeline parallel

    @property
    def world_size(self) -> int:
        return 1 + self.workers


@dataclass(frozen=True, slots=True)
class NativeTransfer:
    """How a replica takes weights: vllm-ascend's `backend` ("hccl" or "npu_ipc"), in buckets of `bucket_bytes`."""

    backend: str
    bucket_bytes: int
    shape: AscendShape

    def __post_init__(self) -> None:
        if self.backend not in self.shape.native:
            release = ".".join(map(str, self.shape.first))
            known = ", ".join(self.shape.native) or "none; weights come through the relay"
            raise EngineError(f"vllm-ascend {release} has no weight transfer {self.backend!r}: {known}")

    @property
    def packed(self) -> bool:
        return self.backend == "hccl" or self.shape.ipc_packed

    def join(self, rpc: Rpc, rendezvous: Rendezvous | None = None) -> None:
        """Meet the sender; once. hccl blocks until all ranks of the group are there."""
        if self.backend == "hccl":
            if rendezvous is None:
                raise EngineError("hccl weight transfer needs a rendezvous with its sender")
            info: dict[str, Any] = {
                "master_address": rendezvous.address,
                "master_port": rendezvous.port,
                "rank_offset": 1,  # a worker adds its own rank inside the replica
                "world_size": rendezvous.world_size,
            }
        else:
            info = {"packed": self.packed} if self.shape.ipc_sender == "factory" else {}
        rpc("init_weight_transfer_engine", args=(info,))

    def receive(self, rpc: Rpc, manifest: WeightManifest, chunks: Iterable[dict[str, Any]] | None = None) -> list[str]:
        """One complete update; the fingerprint of each worker. Returns when the sender has sent and all is checked.

        `chunks` (npu_ipc): the messages of the sender, each with handles of device memory that it keeps until the next
        one is asked for. Raises `WeightSyncError` unless every byte of the manifest's version reached the model.
        """
        if (chunks is None) == (self.backend == "npu_ipc"):
            raise WeightSyncError(f"{self.backend} weight transfer {'needs' if chunks is None else 'takes no'} handles")
        prepares = self.backend == "npu_ipc" and not self.shape.ipc_reloads
        rpc("relay_begin")
        rpc("native_open", args=(prepares,))
        rpc("start_weight_update", args=self.shape.start_args)
        for chunk in [self._announce(manifest)] if chunks is None else chunks:
            rpc("update_weights", args=(chunk,))
        rpc("finish_weight_update")
        names = [p.name for p in manifest.params]
        return rpc("native_close", args=(manifest.version, manifest.fingerprint, names, prepares))

    def _announce(self, manifest: WeightManifest) -> dict[str, Any]:
        """What a receiver of hccl must know before the first broadcast: it allocates by it."""
        return {
            "names": [p.name for p in manifest.params] + [RECEIPT],
            "dtype_names": [p.dtype for p in manifest.params] + [RECEIPT_DTYPE],
            "shapes": [list(p.shape) for p in manifest.params] + [receipt_shape(len(manifest.params))],
            "packed": True,
            "packed_buffer_size_bytes": self.bucket_bytes,
            "packed_num_buffers": BUFFERS,
        }
