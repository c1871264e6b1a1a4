"""Target: megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu.

Reason: the dispatcher asks for numpy split sizes, but the function converts only tensors that live on an accelerator;
on the CPU they stay tensors and the all-to-all call fails. The replacement converts what is already on the host.
Link: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/moe_utils.py
Remove: when upstream converts host tensors too.
"""

from __future__ import annotations

import inspect
from typing import Any

from mindspeed_asyncflow import patches


def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """`tensor` itself, or as a numpy array: it is on the host already."""
    return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor


def install() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    target = getattr(token_dispatcher, "maybe_move_tensor_to_cpu", None)
    if target is on_host:
        return
    parameters = list(inspect.signature(target).parameters) if callable(target) else []
    patches.require(
        parameters == ["tensor", "as_numpy", "record_stream"],
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        f"parameters {parameters}",
    )
    token_dispatcher.maybe_move_tensor_to_cpu = on_host
