"""Ascend NPUs: the only file that imports torch_npu and MindSpeed.

Written from the sources of torch_npu and MindSpeed and exercised with a stand-in for them in the tests; a machine
without an NPU cannot run it for real.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed_asyncflow.config.mindspeed import MindSpeedConfig
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms import mindspeed
from mindspeed_asyncflow.platforms.communicators import buffer_limit_mb, buffer_mb_for, communicator_bytes
from mindspeed_asyncflow.platforms.devices import VISIBLE_ENV, logical_device

_prepared = False  # this process is a trainer


def device_count() -> int:
    """NPUs that torch_npu sees; 0 when the library or its driver cannot be loaded."""
    try:
        torch_npu = importlib.import_module("torch_npu")
    except ImportError:
        return 0
    return int(torch_npu.npu.device_count()) if torch_npu.npu.is_available() else 0


class NpuPlatform:
    name = "npu"
    backend = "hccl"
    ray_resource = "NPU"
    visible_env = VISIBLE_ENV

    def prepare_trainer(self, threads: int) -> None:
        """torch_npu, then MindSpeed, which brings in megatron."""
        global _prepared
        import torch

        torch.set_num_threads(threads)
        if _prepared:
            return
        if any(name.startswith("megatron.core") for name in sys.modules):
            raise PlatformError("the NPU platform must be prepared before megatron.core is imported in this process")
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise PlatformError(f"torch_npu cannot be loaded ({error}): source CANN's set_env.sh first") from error
        # storages are resized, which the runtime refuses for its internal formats
        torch.npu.config.allow_internal_format = False  # type: ignore[attr-defined]
        mindspeed.load()
        _prepared = True

    def apply_features(self, settings: MindSpeedConfig) -> None:
        from mindspeed_asyncflow.platforms import kernels

        kernels.use_torch_for(function for function, fused in mindspeed.operators(settings).items() if not fused)
        mindspeed.apply(mindspeed.arguments(settings))

    def device(self, physical_id: int | None = None) -> Any:
        import torch

        npu = torch.npu  # type: ignore[attr-defined]
        if physical_id is not None:
            npu.set_device(logical_device(physical_id, os.environ.get(VISIBLE_ENV)))
        return torch.device("npu", npu.current_device())

    def synchronize(self) -> None:
        import torch

        torch.npu.synchronize()  # type: ignore[attr-defined]

    def memory_bytes(self) -> tuple[int, int]:
        import torch

        npu = torch.npu  # type: ignore[attr-defined]
        return int(npu.memory_allocated()), int(npu.max_memory_allocated())

    def release_storage(self, storage: Any) -> None:
        storage.resize_(0)  # to torch_npu's caching allocator

    def restore_storage(self, storage: Any, nbytes: int) -> None:
        storage.resize_(nbytes)

    def free_bytes(self) -> int:
        import torch

        npu = torch.npu  # type: ignore[attr-defined]
        return int(npu.memory_reserved()) - int(npu.memory_allocated())

    def free_unused(self) -> None:
        import torch

        torch.npu.empty_cache()  # type: ignore[attr-defined]

    def pinned(self, nbytes: int) -> Any:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def side_stream(self, device: Any) -> Iterator[Callable[[], None]]:
        import torch

        npu = torch.npu  # type: ignore[attr-defined]
        npu.set_device(device)  # a new thread starts on device 0
        stream = npu.Stream()
        with npu.stream(stream):
            yield stream.synchronize

    def unclaimed_bytes(self) -> int | None:
        import torch

        return int(torch.npu.mem_get_info()[0])  # type: ignore[attr-defined]

    def group_options(self, message_bytes: int) -> tuple[Any, int]:
        buffer_mb = min(buffer_limit_mb(os.environ), buffer_mb_for(message_bytes))
        options = importlib.import_module("torch_npu")._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": buffer_mb}
        return options, communicator_bytes(buffer_mb)

    def transformer_overrides(self) -> dict[str, Any]:
        # the local layer spec with our own norm and attention modules calls the NPU operators itself
        return {
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
        }

    def check_transformer_config(self, config: Any) -> None:
        """Every field that megatron accepts is computed rightly here."""
