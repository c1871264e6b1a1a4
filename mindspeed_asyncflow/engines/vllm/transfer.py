"""vLLM's side of the relay: a weight-transfer engine, and an extension of vLLM's worker. Runs in every worker process.

vLLM imports this module by name in each worker (`worker_extension_cls`), which registers the engine, and
the one that stands for `hccl` where vllm-ascend is not installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from mindspeed_asyncflow.engines.vllm import gloo_engine, standing
from mindspeed_asyncflow.engines.vllm.receipt import CheckedLoad
from mindspeed_asyncflow.engines.vllm.versions import RELAY_ENGINE
from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.relay import feed, manifest_from_json


@dataclass
class RelayInit(WeightTransferInitInfo):
    """The relay needs no rendezvous."""


@dataclass
class RelayUpdate(WeightTransferUpdateInfo):
    """One complete weight version; text because nested structures do not cross vLLM's process boundary unchanged."""

    manifest: str = ""


class RelayTransferEngine(WeightTransferEngine[RelayInit, RelayUpdate]):
    """Loads one relay version inside vLLM's start / update / finish life cycle.

    Up to 0.26 vLLM's worker runs the layerwise reload itself and hands `load_weights` in; later the engine owns it.
    """

    init_info_cls = RelayInit
    update_info_cls = RelayUpdate
    loaded = ""  # fingerprint of the last version that was read completely

    def init_transfer_engine(self, init_info: RelayInit) -> None:
        """The relay is opened at each update."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: RelayUpdate, load_weights: Callable[..., Any] | None = None) -> None:
        self.loaded = ""
        load: Callable[..., Any] = load_weights or self.model.load_weights  # type: ignore[assignment]
        self.loaded = feed(manifest_from_json(update_info.manifest), load)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is kept open between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        raise WeightSyncError("trainers publish through RelayWriter, not through vLLM")


class RelayWorker:
    """Methods added to vLLM's worker class."""

    # Members of vLLM's worker that we use.
    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: Any
    weight_transfer_engine: RelayTransferEngine

    _relay_open = False  # between relay_begin and relay_end or native_close
    _relay_loaded = ""
    _native_load: CheckedLoad | None = None
    _kept_weights: standing.Parameters | None = None  # while asleep
    _first_addresses: dict[str, int] | None = None

    def missing_verbs(self, verbs: Sequence[str]) -> list[str]:
        """Those of `verbs` that this worker class does not have."""
        return [verb for verb in verbs if not callable(getattr(self, verb, None))]

    def relay_begin(self) -> None:
        """Open an update when the device has done what it was given. One that broke off leaves half of its layers
        waiting for more weights: complete those with what they have first, else their old parts would count as new
        ones. The coming update overwrites them all."""
        torch.get_device_module(self.device).synchronize()
        model = self.model_runner.model
        if self._relay_open:
            vars(model).pop("load_weights", None)
            with set_current_vllm_config(self.vllm_config), torch.device(self.device):
                finalize_layerwise_reload(model, self.model_config)
            self._weight_update_active = False
        if self._first_addresses is None:
            self._first_addresses = standing.addresses(model)
        self._relay_open = True
        self._relay_loaded = ""

    def relay_load(self, manifest: str) -> None:
        """The whole update without a transfer engine, for releases that have none."""
        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            initialize_layerwise_reload(model)
            self._relay_loaded = feed(manifest_from_json(manifest), model.load_weights)
            finalize_layerwise_reload(model, self.model_config)

    def relay_end(self) -> str:
        """Close a complete update; returns the fingerprint of the bytes that this worker loaded."""
        self._relay_open = False
        return self._relay_loaded or self.weight_transfer_engine.loaded

    def native_open(self, prepare: bool) -> None:
        """Before vLLM's own verbs move weights: what they load passes a check. `prepare`: nobody else makes the model
        ready for a reload."""
        model = self.model_runner.model
        self._native_load = CheckedLoad(model.load_weights)
        model.load_weights = self._native_load  # shadows the method for this update
        if prepare:
            with set_current_vllm_config(self.vllm_config), torch.device(self.device):
                initialize_layerwise_reload(model)

    def native_close(self, version: int, fingerprint: str, names: list[str], prepared: bool) -> str:
        """After them. Returns `fingerprint`, or raises `WeightSyncError` unless this very version was loaded."""
        model = self.model_runner.model
        vars(model).pop("load_weights", None)
        if prepared:
            with set_current_vllm_config(self.vllm_config), torch.device(self.device):
                finalize_layerwise_reload(model, self.model_config)
        assert self._native_load is not None, "native_open comes first"
        load, self._native_load = self._native_load, None
        self._relay_open = False
        load.verify(version, fingerprint, names)
        return fingerprint

    def moved_weights(self) -> list[str]:
        """Tensors of the model that updates have moved to other addresses since the first one began."""
        now, before = standing.addresses(self.model_runner.model), self._first_addresses or {}
        return [name for name, address in before.items() if now.get(name) != address]

    def keep_weights(self) -> None:
        """Before a sleep: which tensors the parameters are. Their memory comes back at its addresses."""
        self._kept_weights = standing.parameters(self.model_runner.model)

    def put_weights_back(self) -> int:
        """After it: parameters that waking replaced by others are what they were; how many these are."""
        kept, self._kept_weights = self._kept_weights, None
        return standing.put_back(kept) if kept is not None else 0

    def free_bytes(self) -> int:
        """Free memory of this worker's device."""
        return int(torch.get_device_module(self.device).mem_get_info()[0])

    def storage_bytes(self) -> int:
        """Bytes of the storages of this worker's weights and key/value caches, each storage once."""
        model, caches = self.model_runner.model, self.model_runner.kv_caches
        storages = [t.untyped_storage() for t in [*model.parameters(), *model.buffers(), *caches]]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def collective_prefix(self) -> str:
        """How the names of the shared-memory files begin over which vLLM's CPU workers reduce."""
        return os.environ["VLLM_DIST_IDENT"]

    def seed_every_row(self) -> None:
        """Make sampling on CPU obey per-request seeds in every batch.

        vLLM's CPU sampler ignores all seeds of a batch that also holds a request without one (greedy); its native
        sampler, which the accelerators use, does not.
        """
        sampler = self.model_runner.sampler.topk_topp_sampler
        if sampler.forward == getattr(sampler, "forward_cpu", None):
            sampler.forward = sampler.forward_native


if RELAY_ENGINE not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(RELAY_ENGINE, RelayTransferEngine)
if importlib.util.find_spec("vllm_ascend") is None:
    gloo_engine.register()
