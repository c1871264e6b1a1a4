"""What megatron's optimizers remember of each parameter, whichever of them it is: plain, chained or distributed.

The distributed optimizer of a rank owns a flat range of a parameter, the others own all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mindspeed_asyncflow.engines.checkpoint import Apart, Share, random_state_of, random_text
from mindspeed_asyncflow.engines.megatron.halves import Halves
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
    """One for each weight of which this rank has state, in the order of `weights` (by name)."""
    owned = {}
    for part in _parts(optimizer):
        if hasattr(part, "model_param_group_index_map"):
            for param, (group, order) in part.model_param_group_index_map.items():
                main = part.optimizer.param_groups[group]["params"][order]
                owned[id(param)] = (part, main, part._get_model_param_range_map(param)["param"].start, True)
        else:
            mains = {id(p) for group in part.optimizer.param_groups for p in group["params"]}
            for param in (getattr(weight, "whole", weight) for weight in weights.values()):
                main = getattr(param, "main_param", param)
                if id(main) in mains:
                    owned[id(param)] = (part, main, 0, False)
    for name, weight in weights.items():
        param = getattr(weight, "whole", weight)
        if id(param) not in owned:
            continue
        part, main, start, sharded = owned[id(param)]
        copied = main.untyped_storage().data_ptr() != param.untyped_storage().data_ptr()
        state = part.optimizer.state[main]
        halves = getattr(part.optimizer, "halves", {}).get(main)
        if param is weight:
            yield Share(name, start, main, copied, state, sharded, _apart(halves, 0, main.numel()))
            continue
        first, last = weight.start, weight.start + weight.numel()  # type: ignore[attr-defined]
        cut = slice(max(first, start) - start, min(last, start + main.numel()) - start)
        if cut.start < cut.stop:  # else other ranks have all of this expert's part
            cut_main = main.detach().view(-1)[cut]
            apart = _apart(halves, cut.start, cut.stop)
            state = _PartOfState(state, main, cut)
            yield Share(name, start + cut.start - first, cut_main, copied, state, sharded, apart)


def _apart(halves: Halves | None, first: int, last: int) -> Apart | None:
    """A range of masters that are kept as halves."""
    if halves is None:
        return None
    return Apart(functools.partial(halves.read, first, last), functools.partial(halves.write, first=first))


class _PartOfState(MutableMapping[str, Any]):
    """State of a flat range of what the optimizer steps on. Setting a tensor copies it into that of the whole."""

    def __init__(self, state: MutableMapping[str, Any], main: torch.Tensor, cut: slice) -> None:
        self._state, self._main, self._cut = state, main, cut

    def __getitem__(self, kind: str) -> Any:
        value = self._state[kind]
        return value.view(-1)[self._cut] if torch.is_tensor(value) else value

    def __setitem__(self, kind: str, value: torch.Tensor) -> None:
        if kind not in self._state:
            self._state[kind] = torch.empty_like(self._main)
        self[kind].copy_(value)

    def __delitem__(self, kind: str) -> None:
        del self._state[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


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
