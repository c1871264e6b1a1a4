"""What every training engine needs, whatever computes its gradients: ranks that meet, the rate of a step, sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.platforms.base import Platform
from mindspeed_asyncflow.platforms.ports import HeldPort


def join_world(
    platform: Platform,
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    timeout_s: float,
    held_port: HeldPort | None = None,
) -> bool:
    """Join the torch.distributed world unless this process is in one already; True when it was joined here.

    Rank 0 may pass the port that it holds: the rendezvous server then takes over the listening socket, and no other
    process can slip in between.
    """
    if dist.is_initialized():
        return False
    timeout = timedelta(seconds=timeout_s)
    descriptor = held_port.detach() if held_port is not None and rank == 0 else None
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=descriptor)
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return True


def learning_rate(step: int, trainer: TrainerConfig) -> float:
    """Rate of the optimizer step number `step` (0-based, skipped steps not counted).

    Rises linearly over `lr_warmup_steps` and reaches the peak at the last of them; then constant, or falling to 0 at
    `trainer.steps` (linear or half a cosine).
    """
    warmup = trainer.lr_warmup_steps
    if step < warmup:
        return trainer.lr * (step + 1) / warmup
    if trainer.lr_decay == "constant":
        return trainer.lr
    left = 1.0 - min(1.0, (step - warmup) / max(1, trainer.steps - warmup))
    if trainer.lr_decay == "linear":
        return trainer.lr * left
    return trainer.lr * 0.5 * (1.0 - math.cos(math.pi * left))


def merge_metrics(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Metrics of several micro-batches: `_max` and `_min` keep the extreme, `_sum` and `_count` add up."""
    keys = sorted({key for part in parts for key in part})
    out = {}
    for key in keys:
        values = torch.stack([part[key].detach().double().reshape(()) for part in parts if key in part])
        if key.endswith("_max"):
            out[key] = float(values.max())
        elif key.endswith("_min"):
            out[key] = float(values.min())
        elif key.endswith(("_sum", "_count")):
            out[key] = float(values.sum())
        else:
            raise ValueError(f"metric {key!r}: the name must end in _sum, _count, _max or _min")
    return out
