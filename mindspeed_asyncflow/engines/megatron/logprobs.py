"""Log-probabilities and entropy from vocabulary-parallel logits, in fp32, without gathering the vocabulary.

Each rank sums over its shard (`platforms/vocabulary.py`); the largest logit and three sums per row cross the
tensor-parallel group instead of a row of logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_asyncflow.platforms.vocabulary import Sums, logprob_and_entropy, rebased, vocabulary_stats


class _AddOverRanks(torch.autograd.Function):
    """Sums over the ranks of a group. All of them compute the same loss from the result, so its gradient is theirs."""

    @staticmethod
    def forward(ctx: Any, group: Any, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        joined = torch.stack(parts)
        dist.all_reduce(joined, group=group)
        return tuple(part.clone() for part in joined)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *grads


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities of `targets`, entropy), both float32 [N]; the entropy carries no gradient.

    logits: [N, V/tp], this rank's rows `vocab_start` .. of the (padded) vocabulary; targets: int64 [N] ids of the full
    vocabulary. Rows at or above `vocab_size` are padding and have probability 0. The temperature divides the logits,
    once. `group` is the tensor-parallel process group, None for one rank; the results are equal on all its ranks.
    """
    shard = logits.shape[1]
    live = shard if vocab_size is None else min(max(vocab_size - vocab_start, 0), shard)
    stats = vocabulary_stats(logits, targets, first=vocab_start, live=live, temperature=temperature)
    top = stats.top
    if group is not None:
        top = top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    sums = rebased(stats, top, temperature)
    if group is not None:
        sums = Sums(*_AddOverRanks.apply(group, *sums))
    logprob, entropy = logprob_and_entropy(sums, top, temperature)
    return logprob, entropy.detach()
