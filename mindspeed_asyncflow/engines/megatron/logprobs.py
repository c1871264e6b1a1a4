"""Log-probabilities and entropy from vocabulary-parallel logits, in fp32, without gathering the vocabulary.

With shards x_r of the logits x (already divided by the temperature), m = max x and y = x - m:
    log p(target) = y[target] - log S,   S = sum exp(y)
    H = log S - sum(exp(y) * y) / S
so three numbers per row cross the tensor-parallel group instead of a row of logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

ABSENT = -1e30  # logit of a padded vocabulary row: its probability is exactly 0, and 0 * ABSENT is 0, not nan


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,  # [N, V/tp], any float type
        targets: torch.Tensor,  # int64 [N], ids of the full vocabulary
        temperature: float,
        vocab_size: int,
        vocab_start: int,
        group: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shard = logits.shape[1]
        y = logits.to(torch.float32, copy=True)  # the caller's logits stay as they are
        if temperature != 1.0:
            y.div_(temperature)
        if vocab_start + shard > vocab_size:
            y[:, max(0, vocab_size - vocab_start) :] = ABSENT
        top = y.amax(dim=-1, keepdim=True)  # [N, 1]
        if group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        y.sub_(top)
        local = targets - vocab_start
        mine = (local >= 0) & (local < shard)
        local = torch.where(mine, local, 0).unsqueeze(1)  # [N, 1]
        picked = y.gather(1, local).squeeze(1) * mine  # 0 on the ranks that do not hold the target
        p = torch.exp(y)
        parts = torch.stack((picked, p.sum(-1), torch.linalg.vecdot(p, y)))  # [3, N]
        if group is not None:
            dist.all_reduce(parts, group=group)
        target_logit, total, weighted = parts
        log_total = total.log()
        p.div_(total.unsqueeze(1))
        ctx.save_for_backward(p, local, mine)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return target_logit - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        p, local, mine = ctx.saved_tensors
        scaled = (grads[0] / ctx.temperature).unsqueeze(1)  # [N, 1]
        # d log p(t) / d x = onehot(t) - p
        grad = p * -scaled
        grad.scatter_add_(1, local, scaled * mine.unsqueeze(1))
        return grad.to(ctx.dtype), None, None, None, None, None


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
    size = vocab_start + logits.shape[1] if vocab_size is None else vocab_size
    logprob, entropy = _TokenLogprobs.apply(logits, targets, temperature, size, vocab_start, group)
    return logprob, entropy
