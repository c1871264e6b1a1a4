"""Functions that tests of halved masters run inside trainer ranks (see rank_group.py)."""

from collections.abc import Callable
from typing import Any

import numpy as np
from critic_cases import critic
from critic_cases import shares as critic_share
from rank_cases import engine, share
from swap_cases import contents, on_host

from mindspeed_asyncflow.engines.megatron import halves

HALVES = {"mindspeed": {"reuse_fp32_param": True}}


def train(rank: int, folder: str, sizes: dict, samples: list, count: int, at_once: int, swap: bool) -> dict[str, Any]:
    """`count` bf16 steps and what they left, with at most `at_once` masters put together; `swap`: the train state
    leaves the device before the last step."""
    usual, halves.ELEMENTS_AT_ONCE = halves.ELEMENTS_AT_ONCE, at_once
    try:
        with engine(rank, folder, sizes, "bfloat16") as made:

            def step() -> tuple[float, float]:
                loss = made.forward_backward(share(samples, made))["loss_sum"]
                return loss, made.optim_step(10.0).grad_norm

            return _trained(made, step, count, swap)
    finally:
        halves.ELEMENTS_AT_ONCE = usual


def train_critic(rank: int, folder: str, sizes: dict, samples: list, ways: list, count: int) -> dict[str, Any]:
    """As `train`. The head of a critic is float32 and has no master."""
    with critic(rank, folder, sizes, "bfloat16") as made:

        def step() -> tuple[float, float]:
            batches = critic_share(samples, made, ways)
            loss = made.forward_backward(batches)["critic/vf_loss_sum"]
            norm = made.optim_step(10.0).grad_norm
            return loss, norm + float(np.concatenate(made.values(batches)).sum())

        return _trained(made, step, count, swap=False)


def _trained(made: Any, step: Callable[[], tuple[float, float]], count: int, swap: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": [step() for _ in range(count - 1)]}
    if swap:
        state = made.train_state()
        before = contents(state)
        with on_host(state):
            pass
        after = contents(state)
        found["identical"] = all(bool((before[k] == after[k]).all()) for k in ("train weights", "optimizer"))
    found["steps"].append(step())
    state = made.train_state()
    found["bytes"] = {kind: sum(t.untyped_storage().nbytes() for t in state[kind]) for kind in state}
    numbers, halved = {}, 0
    for held in made._checkpointer._state():
        tensor = held.tensor if held.read is None else held.read()
        halved += 0 if held.read is None else tensor.numel()
        numbers[held.kind, held.name, held.start] = bits(tensor)
    parts = getattr(made.step.optimizer, "chained_optimizers", [made.step.optimizer])
    kept = [h for part in parts for h in getattr(part.optimizer, "halves", {}).values()]
    return found | {"numbers": numbers, "halved": halved, "masters": sum(len(h.low) for h in kept)}


def bits(tensor: Any) -> np.ndarray:
    """int32 of float32, int16 of bfloat16, flat."""
    import torch

    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().contiguous().view(-1).view(kind).numpy().copy()
