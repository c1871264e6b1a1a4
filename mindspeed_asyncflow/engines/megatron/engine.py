"""`MegatronTrainEngine`: one rank of the policy that is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_asyncflow.engines.megatron.base import MegatronEngine
from mindspeed_asyncflow.engines.megatron.export import export_tensors, held_weights
from mindspeed_asyncflow.engines.megatron.shards import check_shards, named_shards
from mindspeed_asyncflow.records import MicroBatch


class MegatronTrainEngine(MegatronEngine):
    """See `TrainEngine`.

    `loss_fn(logprobs, entropy, batch)` gets float32 [T] log-probabilities of `batch.targets` (with gradient) and
    entropies (without), both 0 where `batch.loss_mask` is 0, and returns the *sum* of the token losses and metrics
    whose names end in `_sum`, `_count`, `_max` or `_min`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_shards(self.layout, dist.get_rank(), self.shards())

    def _token_loss(self, found: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs, entropy = found
        return self.loss_fn(logprobs, entropy.detach(), batch)

    def logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float | None = None) -> list[np.ndarray]:
        """As in the protocol; 0 where `loss_mask` is 0."""
        with self._temperature(temperature):
            return self._first_of_tokens(micro_batches)

    @contextlib.contextmanager
    def _temperature(self, temperature: float | None) -> Iterator[None]:
        """The models divide logits by `temperature` inside the block; None: as in training."""
        usual = [chunk.temperature for chunk in self.chunks]
        try:
            for chunk in self.chunks:
                chunk.temperature = chunk.temperature if temperature is None else temperature
            yield
        finally:
            for chunk, value in zip(self.chunks, usual):
                chunk.temperature = value

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return export_tensors(self.bridge, [held_weights(chunk) for chunk in self.chunks], self.plan)

    def shards(self) -> dict[str, torch.Tensor]:
        return named_shards(self.bridge, self.chunks)
