"""Settings that give wrong weights or crashes on NPU. Pure checks, so that they are tested without one."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_asyncflow.errors import PlatformError


def check_npu_settings(environ: Mapping[str, str], *, sleep: bool, enforce_eager: bool) -> None:
    """Raise `PlatformError` for a combination that vllm-ascend does not survive.

    - FRACTAL_NZ layout: weights are converted after load, an in-place update writes the wrong layout.
    - expandable segments with sleep mode: the sleeping memory pool cannot live in them.
    - graphs: a weight update may move storage that a captured graph replays.
    """
    if environ.get("VLLM_ASCEND_ENABLE_NZ", "1") != "0":
        raise PlatformError("VLLM_ASCEND_ENABLE_NZ must be 0: weights in FRACTAL_NZ layout cannot be updated in place")
    allocator = environ.get("PYTORCH_NPU_ALLOC_CONF", "")
    if sleep and "expandable_segments:true" in allocator.lower().replace(" ", ""):
        raise PlatformError(
            "PYTORCH_NPU_ALLOC_CONF has expandable_segments:True, which sleep mode cannot use: "
            "unset it or do not use sleep"
        )
    if not enforce_eager:
        raise PlatformError("graph mode replays old weight addresses after an update: use eager mode")
