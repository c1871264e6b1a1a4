"""Random answers in both layouts: padded [B, T] as the peers have them, packed [T] as ours. Run in the peers' venv."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mindspeed_asyncflow.algorithms.aggregate import loss_denominator
from mindspeed_asyncflow.algorithms.policy_loss import make_policy_loss
from mindspeed_asyncflow.config.schema import AlgorithmConfig, CorrectionConfig
from mindspeed_asyncflow.records import MicroBatch
from tests.algorithms.cases import micro_batch, on_tokens

ANSWERS, WIDTH = 5, 8


@dataclass(frozen=True)
class Batch:
    """float64 [B, T] log-probabilities of the trained, the older and the reference policy; mask; advantages [B]."""

    mask: torch.Tensor
    now: torch.Tensor
    older: torch.Tensor
    ref: torch.Tensor
    advantages: torch.Tensor
    packed: MicroBatch  # `older` as its rollout policy

    @classmethod
    def random(cls, seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(2, WIDTH, ANSWERS)
        mask = (np.arange(WIDTH) < lengths[:, None]).astype(np.float64)
        now = -2 * rng.random((ANSWERS, WIDTH)) - 0.05
        older, ref = (np.minimum(now + rng.normal(size=now.shape) * 0.35, -0.01) for _ in range(2))
        advantages = rng.normal(size=ANSWERS)
        # powers of two: what is carried as float32 in a batch stays exact
        advantages = np.where(np.abs(advantages) < 0.1, 0.5, np.round(advantages * 64) / 64)
        packed = micro_batch(lengths.tolist(), advantages, older[mask > 0], ref=ref[mask > 0])
        return cls(*map(torch.tensor, (mask, now, older, ref, advantages)), packed)

    def spread(self) -> torch.Tensor:
        """[B, T] advantages."""
        return self.advantages[:, None].expand(ANSWERS, WIDTH).contiguous()


def ours(batch: Batch, algorithm: AlgorithmConfig, correction: CorrectionConfig) -> tuple[float, torch.Tensor]:
    """Our loss and its gradient by the log-probabilities of the answers' tokens."""
    logprobs = on_tokens(batch.packed, batch.now[batch.mask > 0].tolist()).requires_grad_()
    total, parts = make_policy_loss(algorithm, correction)(logprobs, logprobs.detach(), batch.packed)
    denominator = loss_denominator(
        algorithm.aggregation,
        float(parts["actor/loss_tokens_count"]),
        float(parts["actor/loss_sequences_count"]),
        algorithm.loss_horizon,
    )
    loss = total / denominator
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad[torch.from_numpy(batch.packed.loss_mask > 0)]


def apart(batch: Batch, loss: torch.Tensor, logprobs: torch.Tensor, mine: tuple[float, torch.Tensor]) -> float:
    """Largest difference of loss and gradient; `loss` is the peer's, a function of its `logprobs` [B, T]."""
    loss.backward()
    assert logprobs.grad is not None
    return max(abs(loss.item() - mine[0]), float((logprobs.grad[batch.mask > 0] - mine[1]).abs().max()))
