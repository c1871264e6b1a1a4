"""vLLM's side of the relay: a weight-transfer engine, and an extension of vLLM's worker. Runs in every worker process.

vLLM imports this module by name in each worker (`worker_extension_cls`), which registers the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.relay import RelayReader, manifest_from_json

BACKEND = "asyncflow_relay"
EXTENSION = "mindspeed_asyncflow.engines.vllm.transfer.RelayWorker"


@dataclass
class RelayInit(WeightTransferInitInfo):
    """The relay needs no rendezvous."""


@dataclass
class RelayUpdate(WeightTransferUpdateInfo):
    """One complete weight version; text because nested structures do not cross vLLM's process boundary unchanged."""

    manifest: str


class RelayTransferEngine(WeightTransferEngine[RelayInit, RelayUpdate]):
    """Loads one relay version inside vLLM's start / update / finish life cycle.

    Up to 0.26 vLLM's worker runs the layerwise reload itself and hands `load_weights` in; later the engine owns it.
    """

    init_info_cls = RelayInit
    update_info_cls = RelayUpdate
    loaded_fingerprint = ""

    def init_transfer_engine(self, init_info: RelayInit) -> None:
        self.loaded_fingerprint = ""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.loaded_fingerprint = ""
        initialize_layerwise_reload(self.model)

    def receive_weights(
        self, update_info: RelayUpdate, load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], Any] | None = None
    ) -> None:
        reader = RelayReader(manifest_from_json(update_info.manifest))
        fingerprint = reader.verify()
        load: Callable[..., Any] = load_weights or self.model.load_weights  # type: ignore[assignment]
        load(iter(reader))
        reader.check()  # the writer must not have recycled the slot while we copied
        self.loaded_fingerprint = fingerprint

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is kept open between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        raise WeightSyncError("trainers publish through RelayWriter, not through vLLM")


class RelayWorker:
    """Methods added to vLLM's worker class."""

    def relay_fingerprint(self) -> str:
        """Fingerprint of the bytes that this worker loaded last; empty if that did not complete."""
        return self.weight_transfer_engine.loaded_fingerprint  # type: ignore[attr-defined]

    def relay_drop_session(self) -> None:
        """Forget an update session that failed between start and finish, so that the next one can start."""
        self._weight_update_active = False

    def seed_every_row(self) -> None:
        """Make sampling on CPU obey per-request seeds in every batch.

        vLLM's CPU sampler ignores all seeds of a batch that also holds a request without one (greedy); its native
        sampler, which the accelerators use, does not.
        """
        sampler = self.model_runner.sampler.topk_topp_sampler  # type: ignore[attr-defined]
        if sampler.forward == getattr(sampler, "forward_cpu", None):
            sampler.forward = sampler.forward_native


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, RelayTransferEngine)
