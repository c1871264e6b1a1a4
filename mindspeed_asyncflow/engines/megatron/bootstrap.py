"""The order in which a trainer process loads things: platform, megatron, patches."""

from __future__ import annotations

import warnings

from mindspeed_asyncflow import patches
from mindspeed_asyncflow.platforms.base import Platform, current


def bootstrap(platform_name: str = "auto", threads: int = 1) -> Platform:
    """Make this process a trainer process; must come before any import of megatron. Safe to call again."""
    platform = current(platform_name)
    platform.prepare_trainer(threads)
    with warnings.catch_warnings():
        # megatron warns about each optional accelerator library that is absent
        warnings.simplefilter("ignore")
        import megatron.core  # noqa: F401

        patches.apply_trainer(platform.name)
    return platform
