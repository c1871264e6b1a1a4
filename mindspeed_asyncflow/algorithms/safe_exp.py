"""exp() that stays finite in value and gradient."""

from __future__ import annotations

import torch


def safe_exp(x: torch.Tensor, cap: float) -> torch.Tensor:
    """exp(x) up to `cap`, its tangent beyond: continuous, increasing, gradient exp(cap) instead of 0 or overflow.

    Clamping the result instead would end the pull on exactly those tokens that drifted furthest.
    """
    return x.clamp(max=cap).exp() * (1 + (x - cap).clamp(min=0))
