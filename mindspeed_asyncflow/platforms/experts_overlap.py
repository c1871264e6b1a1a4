"""Experts whose messages run beside their computation: MindSpeed's overlap of the all-to-all, on NPUs.

MindSpeed keeps the graph of a layer in pieces and runs their backward passes itself, so that the messages of one piece
are under way while the next one computes. Its own layer class does not fit megatron-core 0.16, which calls it with
arguments that it lacks; this one is megatron's, with MindSpeed's dispatcher and functions in it.

Import after `Platform.prepare_trainer`: this file imports megatron.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from mindspeed_asyncflow.platforms import kernels, mindspeed
from mindspeed_asyncflow.platforms.experts import GroupedExperts


class OverlappedExperts(GroupedExperts):
    """`GroupedExperts` whose backward pass sends gradients away while it computes those of the weights."""

    layer_number = 1

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in `GroupedExperts`; `layer`: the autograd context of the whole layer."""
        weight1, weight2 = self.weight1.transpose(1, 2), self.weight2.transpose(1, 2)
        if not len(tokens):  # then MindSpeed takes the matrices of all experts as one
            weight1, weight2 = self.weight1.flatten(0, 1).t(), weight2.flatten(0, 1)
        ends = torch.cumsum(counts, 0)
        more = (self.weight1, self.weight2, kernels.swiglu, probs, ends, self.layer_number, self.config)
        return mindspeed.overlapped_experts(tokens, weight1, weight2, more, layer)


class OverlappedMoELayer(MoELayer):
    """Gated experts, shared ones too; more than one expert-parallel rank."""

    def __init__(self, config: Any) -> None:
        shared = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        submodules = MoESubmodules(
            experts=ModuleSpec(OverlappedExperts), shared_experts=ModuleSpec(SharedExpertMLP, submodules=shared)
        )
        # read by MindSpeed's functions, which know layers of their own count and not those of a virtual pipeline
        config.n_shared_experts = int(config.moe_shared_expert_intermediate_size is not None)
        config.num_layers_per_virtual_pipeline_stage = 1
        groups = get_default_pg_collection()
        super().__init__(config, submodules, pg_collection=groups)
        self.token_dispatcher = mindspeed.overlapped_dispatcher(
            self.num_local_experts, self.local_expert_indices, config, groups
        )
        self.shared_expert_overlap = self.use_shared_expert
        if self.use_shared_expert:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    def set_layer_number(self, layer_number: int) -> None:
        super().set_layer_number(layer_number)
        self.experts.layer_number = layer_number

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        return mindspeed.overlapped_layer(hidden_states, self.config, self)
