"""This rank's weights under the names of the layout, and the proof that megatron cut the model as the layout says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import TrainParallel
from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.engines.megatron.export import held_weights
from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.layout import Layout
from mindspeed_asyncflow.reshard.train_layout import train_layout


def trainer_layout(model: Mapping[str, Any], trainer: TrainerConfig) -> Layout:
    """Which part of which weight of `model` (a Hugging Face config.json) each trainer rank holds."""
    return train_layout(describe(model), TrainParallel.of(trainer))


def named_weights(bridge: Any, chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's weights, the parameters themselves, under megatron's names, with layers and experts counted over all
    ranks."""
    found = {}
    for chunk in chunks:
        names = bridge._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=True)
        found.update({names[local]: tensor for local, tensor in held_weights(chunk).items()})
    return found


def named_shards(bridge: Any, chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """`named_weights` without gradients. No copies."""
    return {name: tensor.detach() for name, tensor in named_weights(bridge, chunks).items()}


def check_shards(layout: Layout, rank: int, shards: Mapping[str, torch.Tensor]) -> None:
    """Raise `WeightSyncError` unless `shards` are by name and shape what `layout` says of `rank`.

    The layout is computed from the settings alone and every plan relies on it; megatron has cut the model itself.
    """
    wanted = {param.name: tuple(param.shape) for param in layout.ranks[rank]}
    found = {name: tuple(tensor.shape) for name, tensor in shards.items()}
    for name in (*wanted, *found):
        if wanted.get(name) != found.get(name):
            raise WeightSyncError(
                f"trainer rank {rank}: parameter {name} is {found.get(name, 'absent')} in megatron's model and "
                f"{wanted.get(name, 'absent')} in the layout {layout.label or 'of the settings'}"
            )
