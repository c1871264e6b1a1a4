"""MindSpeed in a trainer process: loaded before megatron, told the run's settings before a model is built.

MindSpeed reads sys.argv when it is imported and then replaces functions of torch and megatron. What a run wants is
handed over by its `repatch`, which takes these replacements back, merges the arguments and applies them again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from mindspeed_asyncflow.config.mindspeed import MindSpeedConfig
from mindspeed_asyncflow.errors import PlatformError

ADAPTOR = "mindspeed.megatron_adaptor"
OF_MEGATRON = frozenset({"transformer_impl", "position_embedding_type", "use_flash_attn"})  # in no parser of MindSpeed


def load() -> None:
    """Import the adaptor with its own defaults: sys.argv is that of somebody else. Raises `PlatformError`."""
    argv, sys.argv = sys.argv, sys.argv[:1]
    try:
        importlib.import_module("mindspeed.megatron_adaptor")
    except ImportError as error:
        raise PlatformError(f"MindSpeed cannot be loaded ({error}): bash scripts/install_mindspeed.sh") from error
    finally:
        sys.argv = argv


def operators(settings: MindSpeedConfig) -> dict[str, bool]:
    """The functions of `platforms/kernels.py` that have an NPU operator, and whether it is wanted."""
    return {
        "rms_norm": settings.fused_rmsnorm,
        "swiglu": settings.fused_swiglu,
        "rotary": settings.fused_rope,
        "attention_packed": settings.flash_attention,
    }


def arguments(settings: MindSpeedConfig) -> dict[str, Any]:
    """Arguments of MindSpeed for a run, by the names of its command line with underscores."""
    return {
        "transformer_impl": "local",
        "position_embedding_type": "rope",
        "optimizer_selection": "fused_adamw",
        "use_fused_rmsnorm": settings.fused_rmsnorm,
        "use_fused_swiglu": settings.fused_swiglu,
        "use_fused_rotary_pos_emb": settings.fused_rope,
        "use_flash_attn": settings.flash_attention,
        **settings.arguments,
    }


def compile_grouped_matmul() -> None:
    """Make `grouped_matmul` ready, at the start and not inside the first step. Raises `PlatformError`."""
    function = importlib.import_module("mindspeed.ops.gmm").GMMFunction
    try:
        function.builder.load(verbose=False)
    except Exception as error:  # of a compiler, of its absence, of paths that are None
        raise PlatformError(
            f"MindSpeed cannot compile its grouped matmul ({type(error).__name__}: {error}): it needs a C++ compiler, "
            "ninja and CANN's set_env.sh; or set trainer.moe_grouped_gemm false and trainer.mindspeed.moe_overlap off"
        ) from error


def grouped_matmul(x: Any, weight: Any, ends: Any) -> Any:
    """`npu_gmm` with its gradient. ends: int64 [E], rows up to each group's end."""
    function = importlib.import_module("mindspeed.ops.gmm").GMMFunction
    return function.apply(weight, x, weight, None, (ends, 0, False, 0, 1))


def overlapped_layer(hidden: Any, config: Any, layer: Any) -> Any:
    """A MoE layer forward, its messages beside its computation, here and in the backward pass."""
    module = importlib.import_module("mindspeed.core.transformer.moe.moe_feature.overlap.moe_layer_overlap_all2all")
    return module.MoELayerOverlapAllToAll.apply(hidden, config, layer)


def overlapped_dispatcher(*of_megatron: Any) -> Any:
    """What sends tokens to experts for `overlapped_layer`; takes what megatron's own dispatcher takes."""
    module = importlib.import_module("mindspeed.core.transformer.moe.moe_feature.overlap.token_dispatcher")
    return module.MoEAlltoAllOverLapDispatcher(*of_megatron)


def overlapped_experts(tokens: Any, weight1: Any, weight2: Any, more: tuple[Any, ...], layer: Any) -> Any:
    """The experts of `overlapped_layer`."""
    module = importlib.import_module(
        "mindspeed.core.transformer.moe.moe_feature.overlap.grouped_mlp_with_comp_and_comm_overlap_all2all"
    )
    return module.grouped_mlp_with_comp_and_comm_overlap_all2all(tokens, weight1, weight2, more, layer)


def apply(wanted: Mapping[str, Any]) -> None:
    """Give MindSpeed the arguments of this run. Models of this process are built after that.

    Raises `PlatformError` for a name that this MindSpeed does not have: it would be taken without a word.
    """
    known = vars(importlib.import_module("mindspeed.args_utils").get_mindspeed_args(get_defaults=True))
    unknown = sorted(set(wanted) - set(known) - OF_MEGATRON)
    if unknown:
        raise PlatformError(f"MindSpeed has no argument {', '.join(unknown)} (trainer.mindspeed.arguments)")
    sys.modules[ADAPTOR].repatch(dict(wanted))
