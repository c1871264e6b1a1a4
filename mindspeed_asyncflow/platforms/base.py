"""What the rest of the package asks of a platform, and which platform this process is on."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_asyncflow.errors import PlatformError

if TYPE_CHECKING:
    import torch

PLATFORM_ENV = "ASYNCFLOW_PLATFORM"


class Platform(Protocol):
    """A kind of device. Cheap to construct: heavy libraries are loaded by `prepare_trainer` only."""

    name: str
    backend: str  # torch.distributed backend of device tensors
    ray_resource: str  # "" where Ray counts CPUs only
    visible_env: str  # environment variable that limits the devices; "" where there is none

    def prepare_trainer(self, threads: int) -> None:
        """First call in a trainer process, before megatron is imported. Raises `PlatformError` when too late."""
        ...

    def device(self, physical_id: int | None = None) -> torch.device:
        """The device of this process; `physical_id` is what Ray assigned."""
        ...

    def synchronize(self) -> None: ...

    def memory_bytes(self) -> tuple[int, int]:
        """(in use now, peak), in bytes."""
        ...

    def transformer_overrides(self) -> dict[str, Any]:
        """megatron `TransformerConfig` fields that this platform fixes."""
        ...

    def check_transformer_config(self, config: Any) -> None:
        """Raise `PlatformError` for a field that would give wrong numbers here."""
        ...


def _npu_usable() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    from mindspeed_asyncflow.platforms.npu import device_count

    return device_count() > 0


def current(name: str = "auto") -> Platform:
    """The platform called `name` ("cpu" or "npu"); "auto" takes the NPU where torch_npu sees a device.

    The environment variable ASYNCFLOW_PLATFORM, if set, replaces an "auto".
    """
    if name == "auto":
        name = os.environ.get(PLATFORM_ENV, "auto")
    if name == "auto":
        name = "npu" if _npu_usable() else "cpu"
    if name == "cpu":
        from mindspeed_asyncflow.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if name == "npu":
        from mindspeed_asyncflow.platforms.npu import NpuPlatform

        return NpuPlatform()
    raise PlatformError(f"unknown platform {name!r}: run.platform and {PLATFORM_ENV} take auto, cpu or npu")
