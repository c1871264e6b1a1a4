"""This rank's weights under the names of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def named_shards(bridge: Any, chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's weights under megatron's names, with layers and experts counted over all ranks. No copies."""
    shards = {}
    for chunk in chunks:
        names = bridge._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=True)
        held = {**dict(chunk.named_parameters()), **_router_biases(chunk)}
        shards.update({names[local]: tensor.detach() for local, tensor in held.items()})
    return shards


def _router_biases(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Corrections of expert scores: weights of the model that megatron keeps as buffers."""
    return {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")}
