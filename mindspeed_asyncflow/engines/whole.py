"""For training engines whose ranks each hold the whole model, alone or data parallel: layout, shards, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mindspeed_asyncflow.config.model import FullTensor
from mindspeed_asyncflow.engines.checkpoint import Checkpointer, Share, random_state_of, random_text
from mindspeed_asyncflow.engines.setup import TrainSetup
from mindspeed_asyncflow.observe.checkpoints import SavedFile
from mindspeed_asyncflow.reshard.boxes import whole
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment


def whole_layout(tensors: Mapping[str, torch.Tensor], ranks: int) -> Layout:
    """Every one of `ranks` holds all of `tensors`, which have Hugging Face names."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    full = {name: FullTensor(name, shape, order) for order, (name, shape) in enumerate(shapes.items())}
    params = tuple(LocalParam(name, shape, (Segment(name, whole(shape)),)) for name, shape in shapes.items())
    return Layout(full, (params,) * ranks, label=f"DP{ranks}")


class WholeModel:
    """Base of a training engine: all of `TrainEngine` but `forward_backward`, `optim_step` and `logprobs`.

    weights: what is trained, by the names of the model folder, on every rank; `optimizer` steps on these very tensors.
    `applied` counts the optimizer steps that changed something: `optim_step` must raise it.
    """

    def __init__(
        self, setup: TrainSetup, weights: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        self.setup, self.weights = setup, dict(weights)
        self._layout = whole_layout(self.weights, setup.world_size)
        self._state = _TorchState(optimizer)
        self._checkpointer = Checkpointer(
            setup.platform,
            self._layout,
            setup.rank,
            self.weights,
            self._state,
            model_folder=setup.model_folder,
            timeout_s=setup.timeout_s,
        )

    @property
    def applied(self) -> int:
        return self._state.applied

    @applied.setter
    def applied(self, steps: int) -> None:
        self._state.applied = steps

    @property
    def layout(self) -> Layout:
        return self._layout

    def shards(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in self.weights.items()}

    def begin_save(self, folder: str) -> None:
        self._checkpointer.begin(folder)

    def finish_save(self) -> list[SavedFile]:
        return self._checkpointer.finish()

    def load_checkpoint(self, folder: str) -> None:
        self._checkpointer.load(folder)

    def close(self) -> None:
        self._checkpointer.close()


class _TorchState:
    """A torch optimizer, for `Checkpointer`: what it remembers of a parameter in tensors of the parameter's shape."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.applied = 0
        self._optimizer = optimizer
        self._given: list[tuple[torch.Tensor, dict[str, Any]]] = []  # parameters, and the moments of their shares

    def shares(self, weights: Mapping[str, torch.Tensor]) -> Iterable[Share]:
        state = self._optimizer.state
        self._given = []
        found = []
        for name, weight in weights.items():
            known = state.get(weight, {})
            moments = {k: v for k, v in known.items() if torch.is_tensor(v) and v.shape == weight.shape}
            self._given.append((weight, moments))
            found.append(Share(name, 0, weight.detach(), copied=False, state=moments, sharded=False))
        return found

    def steps_taken(self) -> int:
        return self.applied

    def set_steps_taken(self, steps: int) -> None:
        self._optimizer.state.clear()
        for weight, moments in self._given if steps else ():
            self._optimizer.state[weight] = {**moments, "step": torch.tensor(float(steps))}

    def random_state(self) -> dict[str, Any]:
        return {"torch": random_text(torch.get_rng_state())}

    def restore_random(self, saved: Mapping[str, Any]) -> None:
        torch.set_rng_state(random_state_of(saved["torch"]))
