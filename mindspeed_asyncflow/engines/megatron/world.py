"""Process groups of a trainer rank: one torch.distributed world, cut by megatron's parallel_state."""

from __future__ import annotations

import math

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.errors import ConfigError


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
    """Undo `cut_world`, and `training.join_world` if it joined."""
    parallel_state.destroy_model_parallel()
    if joined_here and dist.is_initialized():
        dist.destroy_process_group()
