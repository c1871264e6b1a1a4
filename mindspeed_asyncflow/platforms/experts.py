"""All experts of a rank as two parameters, multiplied by one operator each; the same on CPU and NPU.

Each expert's part of a parameter is contiguous and has the shape and the orientation that it has as a module of its
own, so checkpoints, optimizer state and weight updates know every expert by its name (`parts`).

Import after `Platform.prepare_trainer`: this file imports megatron.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from mindspeed_asyncflow.platforms import kernels

LAYERS = {"weight1": "linear_fc1", "weight2": "linear_fc2"}  # megatron's names where experts are modules
CUT = {"weight1": 0, "weight2": 1}  # dimension of an expert's weight that expert-tensor ranks share


class GroupedExperts(MegatronModule):
    """In place of megatron's `SequentialMLP`: gated experts without biases."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self.weight1 = self._weight(num_local_experts, 2 * width, config.hidden_size, cut=CUT["weight1"])
        self.weight2 = self._weight(num_local_experts, config.hidden_size, width, cut=CUT["weight2"])
        kernels.prepare_grouped_matmul(self.weight1.device)

    def _weight(self, *shape: int, cut: int) -> torch.nn.Parameter:
        config = self.config
        weight = torch.nn.Parameter(
            torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())  # a model folder fills it
        )
        marks = {
            "allreduce": config.expert_model_parallel_size == 1,  # false: gradients are summed over fewer replicas
            "tensor_model_parallel": True,
            "partition_dim": cut + 1,
            "partition_stride": 1,
        }
        for name, value in marks.items():
            setattr(weight, name, value)
        return weight

    def forward(
        self, tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens: [N, H], expert after expert; counts: int64 [E], tokens of each; probs: [N] -> [N, H]"""
        hidden = kernels.swiglu(kernels.grouped_matmul(tokens, self.weight1.transpose(1, 2), counts))
        hidden = (hidden * probs.unsqueeze(-1)).to(tokens.dtype)
        return kernels.grouped_matmul(hidden, self.weight2.transpose(1, 2), counts), None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As if experts were modules: whoever fills or reads a model by names finds each of them."""
        for name in LAYERS:
            for part, view in parts(f"{prefix}{name}", getattr(self, name)):
                destination[part] = view


def is_grouped(name: str) -> bool:
    """Whether `name` is a parameter of `GroupedExperts`."""
    head, _, last = name.rpartition(".")
    return last in LAYERS and head.endswith(".experts")


def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(megatron's name of an expert's weight as a module of its own, view of `tensor`), for the experts in order.

    `tensor`: [E, ...], a parameter of `GroupedExperts` called `name`, or anything of its shape. A view has the marks of
    a megatron parameter, and `whole` and `start`: its place in the flat `tensor`.
    """
    head, _, last = name.rpartition(".")
    for number, view in enumerate(tensor.detach()):
        view.tensor_model_parallel, view.partition_dim = True, CUT[last]  # type: ignore[attr-defined]
        view.whole, view.start = tensor, number * view.numel()  # type: ignore[attr-defined]
        yield f"{head}.local_experts.{number}.{LAYERS[last]}.weight", view
