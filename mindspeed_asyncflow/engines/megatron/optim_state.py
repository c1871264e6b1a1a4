"""What megatron's optimizers remember of each parameter, whichever of them it is: plain, chained or distributed.

The distributed optimizer of a rank owns a flat range of a parameter, the others own all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mindspeed_asyncflow.engines.checkpoint import Share, random_state_of, random_text
from mindspeed_asyncflow.engines.megatron.optim import GradientStep
from mindspeed_asyncflow.errors import EngineError


class MegatronState:
    """What a rank has of training beside its weights, for `Checkpointer`: megatron's optimizer and random states."""

    def __init__(self, step: GradientStep) -> None:
        self._step = step

    @property
    def applied(self) -> int:
        return self._step.applied

    @applied.setter
    def applied(self, steps: int) -> None:
        self._step.applied = steps

    def shares(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Share]:
        return shares(self._step.optimizer, weights)

    def steps_taken(self) -> int:
        return steps_taken(self._step.optimizer)

    def set_steps_taken(self, steps: int) -> None:
        set_steps_taken(self._step.optimizer, steps)

    def random_state(self) -> dict[str, Any]:
        tracked = {name: random_text(state) for name, state in get_cuda_rng_tracker().get_states().items()}
        return {"torch": random_text(torch.get_rng_state()), "tracker": tracked}

    def restore_random(self, saved: Mapping[str, Any]) -> None:
        torch.set_rng_state(random_state_of(saved["torch"]))
        own = get_cuda_rng_tracker().get_states()
        found = {name: random_state_of(text) for name, text in saved.get("tracker", {}).items()}
        # generators of CPU and NPU have states of different sizes: what the other platform saved says nothing here
        if found.keys() == own.keys() and all(len(found[name]) == len(own[name]) for name in own):
            get_cuda_rng_tracker().set_states(found)


def shares(optimizer: Any, weights: Mapping[str, torch.Tensor]) -> Iterator[Share]:
    """One for each parameter of which this rank has state, in the order of `weights` (by name)."""
    owned = {}
    for part in _parts(optimizer):
        if hasattr(part, "model_param_group_index_map"):
            for param, (group, order) in part.model_param_group_index_map.items():
                main = part.optimizer.param_groups[group]["params"][order]
                owned[id(param)] = (part, main, part._get_model_param_range_map(param)["param"].start, True)
        else:
            mains = {id(p) for group in part.optimizer.param_groups for p in group["params"]}
            for param in weights.values():
                main = getattr(param, "main_param", param)
                if id(main) in mains:
                    owned[id(param)] = (part, main, 0, False)
    for name, param in weights.items():
        if id(param) in owned:
            part, main, start, sharded = owned[id(param)]
            copied = main.untyped_storage().data_ptr() != param.untyped_storage().data_ptr()
            yield Share(name, start, main, copied, part.optimizer.state[main], sharded)


def steps_taken(optimizer: Any) -> int:
    """By which Adam corrects its moments; 0 before the first step."""
    groups = [group for part in _parts(optimizer) for group in part.optimizer.param_groups if group["params"]]
    found = {int(group.get("step", 0)) for group in groups}
    if len(found) > 1:
        raise EngineError(f"groups of the optimizer have taken different numbers of steps: {sorted(found)}")
    return found.pop() if found else 0


def set_steps_taken(optimizer: Any, steps: int) -> None:
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            group["step"] = steps


def _parts(optimizer: Any) -> list[Any]:
    """Dense and expert parameters have an optimizer each, where this rank has such parameters."""
    return [p for p in getattr(optimizer, "chained_optimizers", [optimizer]) if not p.is_stub_optimizer]
