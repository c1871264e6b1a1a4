"""Target: megatron.core.transformer.multi_latent_attention.HAVE_TE.

Reason: it is True wherever Transformer Engine's wrappers can be imported, also when Transformer Engine is absent and
the wrapped names are no classes; building a layer then ends in a TypeError of `isinstance`.
Link: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/multi_latent_attention.py
Remove: when the flag is False without Transformer Engine.
"""

from __future__ import annotations

from mindspeed_asyncflow import patches


def install() -> None:
    from megatron.core.transformer import multi_latent_attention as target

    for name in ("HAVE_TE", "TELinear"):
        patches.require(hasattr(target, name), f"{target.__name__}.{name}", "it is not there")
    if not isinstance(target.TELinear, type):
        target.HAVE_TE = False
