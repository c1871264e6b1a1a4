"""What speaks of CUDA reaches the NPU: `torch.cuda` is `torch.npu`, "nccl" is "hccl"."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

NAMES = (
    *("is_available", "device_count", "init", "_lazy_init", "is_initialized", "set_device", "current_device"),
    *("get_device_name", "get_device_properties", "synchronize", "Event", "Stream", "current_stream", "default_stream"),
    *("stream", "StreamContext", "set_stream", "device", "memory_allocated", "max_memory_allocated", "memory_reserved"),
    *("max_memory_reserved", "reset_peak_memory_stats", "reset_max_memory_allocated", "memory_stats", "mem_get_info"),
    *("empty_cache", "default_generators", "manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state"),
    *("initial_seed", "_lazy_call", "is_bf16_supported", "get_device_capability"),
)


def _hccl(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args = tuple("hccl" if a == "nccl" else a for a in args)
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "hccl"
        return function(*args, **kwargs)

    return wrapped


for _name in NAMES:
    setattr(torch.cuda, _name, getattr(torch.npu, _name))
for _name in ("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state"):
    setattr(torch.cuda.random, _name, getattr(torch.npu, _name))
for _module in (dist, dist.distributed_c10d):
    for _name in ("init_process_group", "new_group"):
        setattr(_module, _name, _hccl(getattr(_module, _name)))
