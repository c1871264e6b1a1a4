"""Changes to upstream symbols, one per file. `apply_trainer` installs those that this process needs.

Each file states its target, the reason, a link and when it can go. A patch checks that its target still looks as
expected and raises `PlatformError` otherwise; installing it twice changes nothing.
"""

from __future__ import annotations

from mindspeed_asyncflow.errors import PlatformError


def apply_trainer(platform_name: str) -> list[str]:
    """Install the patches of a trainer, after megatron's import. Returns the names of those now in place."""
    from mindspeed_asyncflow.patches import (
        latent_attention_without_te,
        mbridge_packages,
        moe_router_gemm,
        moe_split_sizes,
        optimizer_adam,
    )

    patches = [mbridge_packages]
    if platform_name == "cpu":  # MindSpeed supplies these names on the NPU
        patches += [latent_attention_without_te, moe_router_gemm, moe_split_sizes, optimizer_adam]
    for patch in patches:
        patch.install()
    return [patch.__name__.rsplit(".", 1)[-1] for patch in patches]


def require(holds: bool, target: str, seen: str) -> None:
    """Stop loudly when an upstream symbol is no longer what a patch was written for."""
    if not holds:
        raise PlatformError(
            f"patch target {target} has moved ({seen}): install the pinned megatron-core, or revise the patch"
        )
