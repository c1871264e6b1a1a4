"""Functions that tests of the critic run inside trainer ranks (see rank_group.py)."""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rank_cases import gradients
from tiny_models import pack

from mindspeed_asyncflow.algorithms.value_loss import make_value_loss
from mindspeed_asyncflow.config.schema import CriticConfig, TrainerConfig
from mindspeed_asyncflow.workflow.batcher import pack as pack_samples

CLIP = 0.3
NOTHING = pack_samples([])


@contextlib.contextmanager
def critic(rank: int, folder: str, sizes: dict, dtype: str = "float32", clip: float | None = CLIP) -> Iterator[Any]:
    from mindspeed_asyncflow.engines.megatron import MegatronCritic

    trainer = TrainerConfig(**{"lr": 1e-2, "lr_warmup_steps": 0, **sizes})
    made = MegatronCritic(
        folder,
        trainer,
        dtype=dtype,
        loss_fn=make_value_loss(CriticConfig(value_clip=clip)),
        rank=rank,
        world_size=trainer.world_size,
        master_port=0,  # the world is there already
        seed=1,
        timeout_s=60,
        platform="cpu",
    )
    try:
        yield made
    finally:
        made.close()


def batch_of(samples: Sequence[dict]) -> Any:
    """Samples with `values` and `returns` as a micro-batch; none: one that has nothing to train."""
    if not samples:
        return NOTHING
    known = {n: np.concatenate([s[n] for s in samples]).astype(np.float32) for n in ("values", "returns")}
    return replace(pack(list(samples)), **known)


def shares(samples: list, made: Any, ways: Sequence[Sequence[int]]) -> list:
    """Micro-batches of this data-parallel replica, of `ways[replica]` samples each."""
    first = sum(sum(way) for way in ways[: made.data_parallel_rank])
    batches = []
    for size in ways[made.data_parallel_rank]:
        batches.append(batch_of(samples[first : first + size]))
        first += size
    return batches


def set_head(made: Any, weight: np.ndarray, bias: float) -> None:
    for chunk in made.chunks:
        if chunk.post_process:
            with torch.no_grad():
                chunk.output_layer.weight.copy_(torch.from_numpy(weight)[None])
                chunk.output_layer.bias.fill_(bias)
    made.step.optimizer.reload_model_params()


def agree(
    rank: int, folder: str, sizes: dict, samples: list, ways: list, weight: np.ndarray, bias: float, dtype="float32"
) -> dict[str, Any]:
    """Values with the head at 0, values and gradients with a given head, and one optimizer step."""
    with critic(rank, folder, sizes, dtype) as made:
        batches = shares(samples, made, ways)
        untrained = made.values(batches)
        set_head(made, weight, bias)
        values = made.values(batches)
        metrics = made.forward_backward(batches)
        result = {
            "replica": made.data_parallel_rank,
            "zero": all(not v.any() for v in untrained),
            "values": np.concatenate([v for v, b in zip(values, batches) if b is not NOTHING]),
            "metrics": metrics,
            "names": [name for chunk in made.chunks for name, _ in chunk.named_parameters()],
            "grads": None if sizes.get("distributed_optimizer") else gradients(made),
        }
        made.step.clear()
        made.forward_backward(batches)
        report = made.optim_step(10.0)
        after = made.values(batches)
        return result | {
            "norm": report.grad_norm,
            "applied": report.applied,
            "moved": bool(any((a != b).any() for a, b in zip(after, values))),
        }


def bad_gradient(rank: int, folder: str, sizes: dict, samples: list, ways: list, name: str) -> list[tuple]:
    """Steps with nan in `name` on the last rank, then one without; (applied, bad tensor, norm is nan) of each."""
    found = []
    with critic(rank, folder, sizes) as made:
        for bad in (True, True, False):
            made.forward_backward(shares(samples, made, ways))
            if bad and rank == made.trainer.world_size - 1:
                dict(made.chunks[-1].named_parameters())[name].main_grad.view(-1)[0] = math.nan
            report = made.optim_step(10.0)
            found.append((report.applied, report.bad_tensor, math.isnan(report.grad_norm)))
    return found


def learn(rank: int, folder: str, sizes: dict, samples: list, steps: int, dtype: str = "float32") -> list[float]:
    """Mean squared error of each step; every return is 0.75."""
    tokens = sum(float(s["mask"].sum()) for s in samples)
    batches, errors = [batch_of(samples)], []
    with critic(rank, folder, sizes, dtype, clip=None) as made:
        for _ in range(steps):
            errors.append(2 * made.forward_backward(batches)["critic/vf_loss_sum"] / tokens)
            made.optim_step(tokens)
    return errors


def resume(rank: int, folder: str, sizes: dict, samples: list, ways: list, out: str) -> dict[str, Any]:
    """A step, a checkpoint, a step; and the last one again in a new engine."""

    def step(made: Any) -> np.ndarray:
        batches = shares(samples, made, ways)
        made.forward_backward(batches)
        made.optim_step(10.0)
        return np.concatenate(made.values(batches))

    with critic(rank, folder, sizes) as made:
        step(made)
        made.begin_save(os.path.join(out, "critic"))
        straight = step(made)
        made.finish_save()
    with critic(rank, folder, sizes) as made:  # which all ranks make together, so all have written
        made.load_checkpoint(os.path.join(out, "critic"))
        return {"equal": np.array_equal(step(made), straight)}
