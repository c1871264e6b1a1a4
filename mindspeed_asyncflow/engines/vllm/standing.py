"""Where a model's weights stand, for workers whose sleep or update must leave them there."""

from __future__ import annotations

import torch

Parameters = list[tuple[torch.nn.Module, str, torch.nn.Parameter]]


def parameters(model: torch.nn.Module) -> Parameters:
    """Every parameter of every layer, with the layer and its name there."""
    return [(layer, name, p) for layer in model.modules() for name, p in layer._parameters.items() if p is not None]


def put_back(kept: Parameters) -> int:
    """Parameters that are not the kept objects any more become these again; their number.

    A kept object still has its loader attributes, shape and address, where the new one is a turned view of its memory.
    """
    count = 0
    for layer, name, parameter in kept:
        if layer._parameters.get(name) is not parameter:
            layer._parameters[name] = parameter
            count += 1
    return count


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """Data address of all parameters and buffers, and of tensors that layers hold as plain attributes, by name."""
    found: dict[str, int] = {}
    for path, layer in model.named_modules():
        held = {**layer._parameters, **layer._buffers, **vars(layer)}
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                found[f"{path}.{name}"] = value.data_ptr()
    return found
