"""Runs inside a trainer rank (see tests/engines/megatron/rank_group.py)."""

from __future__ import annotations

import numpy as np

from mindspeed_asyncflow.config.schema import AlgorithmConfig, TrainerConfig


def gradients(rank: int, folder: str, batches: list) -> list[dict[str, np.ndarray]]:
    """By parameter, for each micro-batch on its own, with the loss that runs use."""
    from mindspeed_asyncflow.algorithms.policy_loss import make_policy_loss
    from mindspeed_asyncflow.engines.megatron import MegatronTrainEngine

    engine = MegatronTrainEngine(
        folder,
        TrainerConfig(),
        dtype="float32",
        temperature=1.0,
        loss_fn=make_policy_loss(AlgorithmConfig()),
        rank=rank,
        world_size=1,
        master_port=0,  # the world is there already
        seed=1,
        timeout_s=60,
        platform="cpu",
    )
    found = []
    for batch in batches:
        engine.forward_backward([batch])
        chunk = engine.chunks[0]
        found.append({n: p.main_grad.numpy().copy() for n, p in chunk.named_parameters()})
        engine.step.clear()
    engine.close()
    return found
