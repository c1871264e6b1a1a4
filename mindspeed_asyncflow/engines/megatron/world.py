"""Process groups of a trainer rank: one torch.distributed world, cut by megatron's parallel_state."""

from __future__ import annotations

import math
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.errors import ConfigError
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


def cut_world(trainer: TrainerConfig, seed: int, timeout_s: float) -> None:
    """Make megatron's groups for TP, PP, CP, DP and EP out of all ranks."""
    if dist.get_world_size() != trainer.world_size:
        raise ConfigError(
            f"{dist.get_world_size()} trainer ranks were started, but tensor x pipeline x context x data parallel "
            f"sizes make {trainer.world_size}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        virtual_pipeline_model_parallel_size=trainer.virtual_pipeline,
        context_parallel_size=trainer.context_parallel,
        expert_model_parallel_size=trainer.expert_parallel,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def leave_world(joined_here: bool) -> None:
    """Undo `cut_world`, and `join_world` if it joined."""
    parallel_state.destroy_model_parallel()
    if joined_here and dist.is_initialized():
        dist.destroy_process_group()
