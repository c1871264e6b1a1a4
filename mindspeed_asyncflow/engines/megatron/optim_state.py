"""What megatron's optimizers remember of each parameter, whichever of them it is: plain, chained or distributed.

The distributed optimizer of a rank owns a flat range of a parameter, the others own all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_asyncflow.errors import EngineError

MASTER = "master"


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank's optimizer has of one parameter."""

    name: str  # of the parameter
    start: int  # first element of the range, in the flat parameter
    main: torch.Tensor  # what the optimizer steps on: the parameter, a range of it, or a float32 copy of either
    copied: bool  # it is a copy
    state: dict[str, Any]  # moments by name; empty before the first step
    sharded: bool  # over data-parallel ranks


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
