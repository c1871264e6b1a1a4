"""The loss of a critic (PPO, arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from mindspeed_asyncflow.records import MicroBatch

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import CriticConfig

ValueLoss = Callable[[torch.Tensor, torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def make_value_loss(cfg: CriticConfig) -> ValueLoss:
    """(values [T] with gradient, unused, batch) -> (loss sum, metric parts).

    Per token 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), c = `critic.value_clip`; without it the first
    term alone. Summed over trained tokens: the engine divides by their number in the global batch.
    """

    def value_loss(
        values: torch.Tensor, unused: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if batch.values is None or batch.returns is None:
            raise ValueError("a critic trains on batches with values and returns")
        trained = np.flatnonzero(batch.loss_mask)
        values = values.index_select(0, torch.from_numpy(trained).to(values.device))
        before = torch.from_numpy(batch.values[trained]).to(values)
        returns = torch.from_numpy(batch.returns[trained]).to(values)
        error = (values - returns).square()
        clipped = torch.zeros_like(error, dtype=torch.bool)
        if cfg.value_clip is not None:
            bounded = (before + (values - before).clamp(-cfg.value_clip, cfg.value_clip) - returns).square()
            clipped = bounded > error
            error = torch.maximum(error, bounded)
        loss = 0.5 * error.sum()
        with torch.no_grad():
            found = {
                "critic/tokens_count": torch.ones_like(error),
                "critic/vf_loss_sum": 0.5 * error,
                "critic/vf_clipfrac_sum": clipped,
                "critic/values_sum": values,
                "critic/returns_sum": returns,
                "critic/returns_sq_sum": returns.square(),
                "critic/residual_sq_sum": (returns - before).square(),
                "critic/residual_sum": returns - before,
            }
            parts = {name: value.to(error.dtype).sum() for name, value in found.items()}
        return loss, parts

    return value_loss
