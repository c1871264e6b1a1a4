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


def apply(wanted: Mapping[str, Any]) -> None:
    """Give MindSpeed the arguments of this run. Models of this process are built after that.

    Raises `PlatformError` for a name that this MindSpeed does not have: it would be taken without a word.
    """
    known = vars(importlib.import_module("mindspeed.args_utils").get_mindspeed_args(get_defaults=True))
    unknown = sorted(set(wanted) - set(known) - OF_MEGATRON)
    if unknown:
        raise PlatformError(f"MindSpeed has no argument {', '.join(unknown)} (trainer.mindspeed.arguments)")
    sys.modules[ADAPTOR].repatch(dict(wanted))
