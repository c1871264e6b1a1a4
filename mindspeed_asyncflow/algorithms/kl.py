"""KL estimators against a reference policy, per token (Schulman, "Approximating KL divergence").

With d = log pi - log ref: k1 = d, k2 = d^2/2, k3 = exp(-d) + d - 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_asyncflow.algorithms.safe_exp import safe_exp
from mindspeed_asyncflow.errors import ConfigError

EXP_CAP = 10.0  # nats by which ref may exceed pi before k3 grows linearly instead of exponentially


def k1(logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """d; unbiased as a value, useless as a loss: its gradient does not contain the reference."""
    return logprobs - ref


def k2(logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """d^2 / 2; its gradient is that of the true KL in expectation."""
    return 0.5 * (logprobs - ref).square()


def k3(logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """exp(-d) + d - 1; non-negative. Linear where -d is above `EXP_CAP`, so value and gradient stay finite."""
    x = ref - logprobs
    return safe_exp(x, EXP_CAP) - x - 1


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_loss(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The estimator `name` for use as a loss term: added, so that minimising the loss moves towards the reference."""
    if name == "k1":
        raise ConfigError("algorithm.kl_type k1 cannot be a loss: its gradient ignores the reference; use k2 or k3")
    if name not in ESTIMATORS:
        raise ConfigError(f"algorithm.kl_type {name!r} is unknown; as a loss there are: k2, k3")
    return ESTIMATORS[name]
