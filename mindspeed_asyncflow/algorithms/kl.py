"""KL estimators against a reference policy, per token (Schulman, "Approximating KL divergence").

With d = log pi - log ref: k1 = d, k2 = d^2/2, k3 = exp(-d) + d - 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mindspeed_asyncflow.algorithms.safe_exp import safe_exp
from mindspeed_asyncflow.errors import ConfigError

EXP_CAP = 10.0  # nats by which ref may exceed pi before k3 grows linearly instead of exponentially


def k2(logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """d^2 / 2; its gradient is that of the true KL in expectation."""
    return 0.5 * (logprobs - ref).square()


def k3(logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """exp(-d) + d - 1; non-negative. Linear where -d is above `EXP_CAP`, so value and gradient stay finite."""
    x = ref - logprobs
    return safe_exp(x, EXP_CAP) - x - 1


def k3_plus(logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Value of k3, gradient of k2: reads as the one and pulls as the true KL does in expectation."""
    smooth = k2(logprobs, ref)
    return smooth + (k3(logprobs, ref) - smooth).detach()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k2": k2, "k3": k3, "k3+": k3_plus}


def kl_loss(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The estimator `name` for use as a loss term: added, so that minimising the loss moves towards the reference."""
    if name == "k1":
        raise ConfigError("algorithm.kl_type k1 cannot be a loss: its gradient ignores the reference; use k2 or k3")
    if name not in LOSSES:
        raise ConfigError(f"algorithm.kl_type {name!r} is unknown; as a loss there are: {', '.join(LOSSES)}")
    return LOSSES[name]


def kl_values(name: str, logprobs: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """float64 [L] estimates for the reward; `logprobs` of the policy that sampled."""
    d = np.asarray(logprobs, np.float64) - np.asarray(ref, np.float64)
    if name == "k1":
        return d
    if name == "k2":
        return d * d / 2
    if name == "k3":
        x = -d
        return np.exp(np.minimum(x, EXP_CAP)) * (1 + np.maximum(x - EXP_CAP, 0)) - x - 1
    raise ConfigError(f"algorithm.kl_type {name!r} cannot be in the reward; there are: k1, k2, k3")
