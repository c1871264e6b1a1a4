"""The CPU as a training device: gloo, host memory, and megatron-core behind the torch.cuda shims."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mindspeed_asyncflow.config.mindspeed import MindSpeedConfig
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.cpu_pages import PagePool

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_PAGES = PagePool()  # one for the process, like malloc


def resident_bytes() -> tuple[int, int]:
    """(now, peak) resident set of this process, in bytes: the honest CPU figure for "device memory"."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with open("/proc/self/statm") as f:
            now = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        now = peak
    return now, peak


def _keep_freed_memory() -> None:
    """Let malloc keep what is freed, as a device allocator does. Otherwise each activation is mapped anew and the
    kernel clears its pages: 10 to 15 % of the time of a small model's step. Without glibc nothing is changed."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


class CpuPlatform:
    name = "cpu"
    backend = "gloo"
    ray_resource = ""
    visible_env = ""

    def prepare_trainer(self, threads: int) -> None:
        import torch

        from mindspeed_asyncflow.platforms import cpu_shims

        torch.set_num_threads(threads)
        _keep_freed_memory()
        cpu_shims.apply()

    def apply_features(self, settings: MindSpeedConfig) -> None:
        """None of them is about the CPU; `config/mindspeed.py` says so to those who set them."""

    def device(self, physical_id: int | None = None) -> Any:
        import torch

        return torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back on a CPU."""

    def memory_bytes(self) -> tuple[int, int]:
        return resident_bytes()

    def release_storage(self, storage: Any) -> None:
        if storage.nbytes():
            _PAGES.keep(storage.data_ptr(), storage.nbytes())
        storage.resize_(0)

    def restore_storage(self, storage: Any, nbytes: int) -> None:
        storage.resize_(nbytes)
        if nbytes:
            _PAGES.put(storage.data_ptr(), nbytes)

    def free_bytes(self) -> int:
        return _PAGES.nbytes

    def free_unused(self) -> None:
        """The pool is this platform's device memory: it stays for the next block."""

    def pinned(self, nbytes: int) -> Any:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8)

    def side_stream(self, device: Any) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(self.synchronize)

    def unclaimed_bytes(self) -> int | None:
        return None

    def group_options(self, message_bytes: int) -> tuple[Any, int]:
        return None, 0

    def transformer_overrides(self) -> dict[str, Any]:
        return {
            # every fused kernel is a device kernel
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            "moe_permute_fusion": False,
            # gloo's isend still reads the tensor that this option would free
            "deallocate_pipeline_outputs": False,
        }

    def check_transformer_config(self, config: Any) -> None:
        for field, wanted in self.transformer_overrides().items():
            if getattr(config, field, wanted) != wanted:
                raise PlatformError(
                    f"megatron setting {field}={getattr(config, field)!r} cannot be used on the CPU platform "
                    f"(must be {wanted!r}); with deallocate_pipeline_outputs=True gradients are silently wrong"
                )
        vpp = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
        if vpp > 1 and (getattr(config, "batch_p2p_comm", False) or not getattr(config, "overlap_p2p_comm", True)):
            raise PlatformError("a virtual pipeline needs overlap_p2p_comm=True and batch_p2p_comm=False")
