"""`MegatronCritic`: one rank of the critic of PPO."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mindspeed_asyncflow.engines.megatron.base import MegatronEngine
from mindspeed_asyncflow.records import MicroBatch


class MegatronCritic(MegatronEngine):
    """See `CriticEngine`. The policy's model with a value head in place of the vocabulary's, from the same weights.

    `loss_fn(values, values, batch)` gets float32 [T], 0 where `batch.loss_mask` is 0, and returns the *sum* of the
    token losses and metrics as that of `MegatronTrainEngine` does.
    """

    VALUES = True

    def _loaded(self) -> None:
        for chunk in self.chunks:
            chunk.add_head(self.device)

    def _token_loss(self, found: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.loss_fn(found[0], found[0].detach(), batch)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        return self._first_of_tokens(micro_batches)
