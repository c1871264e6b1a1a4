"""Target: megatron.core.transformer.moe.moe_utils.te_general_gemm (megatron-core 0.13 to 0.16).

Reason: the router's GEMM tests this name against None, but without Transformer Engine the name is never bound, so each
MoE forward ends in a NameError. Binding None takes the torch branch that the code already has.
Link: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/moe_utils.py
Remove: when the pinned megatron-core binds the name on its own.
"""

from __future__ import annotations

import inspect

from mindspeed_asyncflow import patches


def install() -> None:
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "te_general_gemm"):
        return
    patches.require(
        "te_general_gemm is not None" in inspect.getsource(moe_utils),
        "megatron.core.transformer.moe.moe_utils.te_general_gemm",
        "its test against None is gone",
    )
    moe_utils.te_general_gemm = None
