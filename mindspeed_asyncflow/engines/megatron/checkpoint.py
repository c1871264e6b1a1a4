"""Checkpoints in megatron's sharded format: model, optimizer, applied steps, RNG, and a JSON file of the caller's."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mindspeed_asyncflow.engines.megatron.optim import GradientStep
from mindspeed_asyncflow.errors import EngineError

EXTRA = "extra.json"
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _rng_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}


def _restore_rng(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    own = get_cuda_rng_tracker().get_states()
    # generators of CPU and NPU have states of different sizes: what the other platform saved says nothing here
    if all(len(state) == len(own[name]) for name, state in saved["tracker"].items() if name in own):
        get_cuda_rng_tracker().set_states(saved["tracker"])


def _sharded_state(chunks: Sequence[Any], step: GradientStep, loading: bool) -> dict[str, Any]:
    model = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    flat = model["model0"] if len(chunks) == 1 else model
    state: dict[str, Any] = dict(model)
    state["optimizer"] = step.optimizer.sharded_state_dict(flat, is_loading=loading, metadata=OPTIMIZER_FORMAT)
    rank, world = dist.get_rank(), dist.get_world_size()
    state["rng"] = ShardedObject("rng", _rng_state(), (world,), (rank,))
    state["applied_steps"] = step.applied
    return state


def _load_optimizer(optimizer: Any, state: dict[Any, Any]) -> None:
    """The state of parameters by itself: under MindSpeed, a distributed optimizer's `load_state_dict` is MindSpeed's,
    which does not know the format."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state] if len(parts) == 1 else [state[i] for i in sorted(state)]
    held = [of_part.pop("param_state", None) for of_part in states]
    optimizer.load_state_dict(state)
    for part, of_parameters in zip(parts, held, strict=True):
        if of_parameters is not None:
            part.load_parameter_state_from_fully_reshardable(of_parameters)


def save(folder: str, chunks: Sequence[Any], step: GradientStep, extra: dict[str, Any]) -> None:
    """Write all shards to `folder` (made if missing). Collective; returns when all ranks have written."""
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(chunks, step, loading=False), folder)
    if dist.get_rank() == 0:
        with open(os.path.join(folder, EXTRA), "w") as f:
            json.dump(extra, f)
    dist.barrier()


@torch.no_grad()
def load(folder: str, chunks: Sequence[Any], step: GradientStep) -> dict[str, Any]:
    """Restore what `save` wrote, on the same number of ranks, and return its `extra`. Collective."""
    path = os.path.join(folder, EXTRA)
    if not os.path.isfile(path):
        raise EngineError(f"{folder} is not a complete trainer checkpoint: {EXTRA} is missing")
    state = dist_checkpointing.load(_sharded_state(chunks, step, loading=True), folder)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}"])
    _load_optimizer(step.optimizer, state["optimizer"])
    step.applied = int(state["applied_steps"])
    _restore_rng(state["rng"])
    with open(path) as f:
        return json.load(f)
