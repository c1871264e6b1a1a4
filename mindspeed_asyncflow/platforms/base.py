"""What the rest of the package asks of a platform, and which platform this process is on."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_asyncflow.config.mindspeed import MindSpeedConfig
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

    def apply_features(self, settings: MindSpeedConfig) -> None:
        """After `prepare_trainer`, before a model is built: what the run wants of the libraries of this platform."""
        ...

    def device(self, physical_id: int | None = None) -> torch.device:
        """The device of this process; `physical_id` is what Ray assigned."""
        ...

    def synchronize(self) -> None: ...

    def memory_bytes(self) -> tuple[int, int]:
        """(in use now, peak) of this process's device allocator, in bytes; on a CPU the resident set."""
        ...

    def release_storage(self, storage: torch.UntypedStorage) -> None:
        """Give the storage's bytes back to the device allocator: 0 bytes are left, all tensors on it stay valid objects
        that must not be read."""
        ...

    def restore_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give an empty storage `nbytes` bytes of undefined contents."""
        ...

    def free_bytes(self) -> int:
        """Bytes that the device allocator of this process holds unused, for the next storage."""
        ...

    def free_unused(self) -> None:
        """Hand what the device allocator holds unused to the other processes of this device."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] in host memory that the device can copy from and to without staging, where that exists."""
        ...

    def side_stream(self, device: torch.device) -> AbstractContextManager[Callable[[], None]]:
        """Inside, device work of this thread runs beside that of other threads; the value waits for what was queued."""
        ...

    def unclaimed_bytes(self) -> int | None:
        """Bytes of this device that no process has; None where devices have no memory of their own."""
        ...

    def group_options(self, message_bytes: int) -> tuple[Any, int]:
        """(`pg_options` of a `new_group` that moves at most `message_bytes` at a time, bytes of device memory that such
        a group takes beside the allocator). Raises `PlatformError` for a bound in the environment that is none."""
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
