"""Log-probability and entropy of tokens from one rank's shard of the vocabulary: torch operators, and how shards join.

    stats = vocabulary_stats(logits, targets, ...)             four numbers a row, on each shard
    top   = the largest stats.top of all shards                 (a maximum over the tensor-parallel ranks)
    sums  = rebased(stats, top, temperature)                    added up over the shards
    logprob, entropy = logprob_and_entropy(sums, top, temperature)

Everything is differentiable in the logits but the maxima, which cancel. The backward pass needs the logits again and
gives their gradient in their own type; nothing as large as they are is kept beside them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mindspeed_asyncflow.errors import EngineError
from mindspeed_asyncflow.platforms import kernels

_STATS = "(Tensor logits, Tensor targets, int first, int live, float temperature) -> (Tensor, Tensor, Tensor, Tensor)"
_GRADIENT = (
    "(Tensor logits, Tensor targets, Tensor top, Tensor by_total, Tensor? by_weighted, Tensor by_picked, int first,"
    " int live, float temperature) -> Tensor"
)


class Stats(NamedTuple):
    """Of each row of a shard, float32 [N]; `vocabulary_torch` has the formulas."""

    top: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor
    picked: torch.Tensor


class Sums(NamedTuple):
    """What shards of one row add up, float32 [N], relative to one common top."""

    total: torch.Tensor
    weighted: torch.Tensor
    picked: torch.Tensor


@torch.library.custom_op("asyncflow::vocabulary_gradient", mutates_args=(), schema=_GRADIENT)
def vocabulary_gradient(logits, targets, top, by_total, by_weighted, by_picked, first, live, temperature):
    return kernels.vocabulary_path(logits, "gradient")(
        logits, targets, top, by_total, by_weighted, by_picked, first, live, temperature
    )


@vocabulary_gradient.register_fake
def _(logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("asyncflow::vocabulary_stats", mutates_args=(), schema=_STATS)
def _stats(logits, targets, first, live, temperature):
    return kernels.vocabulary_path(logits, "stats")(logits, targets, first, live, temperature)


@_stats.register_fake
def _(logits, *_):
    return tuple(torch.empty(logits.shape[:1], dtype=torch.float32, device=logits.device) for _ in range(4))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    logits, targets, ctx.first, ctx.live, ctx.temperature = inputs
    ctx.save_for_backward(logits, targets, output[0])
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)  # an entropy outside the loss costs nothing then


def _backward(ctx: Any, _: Any, by_total: Any, by_weighted: Any, by_picked: Any) -> tuple[Any, None, None, None, None]:
    logits, targets, top = ctx.saved_tensors
    by_total, by_picked = (torch.zeros_like(top) if by is None else by for by in (by_total, by_picked))
    gradient = vocabulary_gradient(
        logits, targets, top, by_total, by_weighted, by_picked, ctx.first, ctx.live, ctx.temperature
    )
    return gradient, None, None, None, None


_stats.register_autograd(_backward, setup_context=_keep)


def vocabulary_stats(
    logits: torch.Tensor, targets: torch.Tensor, *, first: int = 0, live: int | None = None, temperature: float = 1.0
) -> Stats:
    """Sums over one shard of the vocabulary, accumulated in fp32; the logits are left as they are.

    logits: [N, V/tp], any float type, finite; column 0 is the token `first`, columns from `live` on are padding (None:
    there is none). targets: int64 [N], ids of the full vocabulary. The temperature divides the logits.
    Raises `EngineError` for shapes that do not fit and for a temperature that is not positive.
    """
    width = logits.shape[-1]
    live = width if live is None else live
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or not 0 <= live <= width:
        raise EngineError(
            f"logits {list(logits.shape)}, targets {list(targets.shape)} and {live} live columns do not fit together:"
            " they are [N, V], [N] and 0..V"
        )
    if not temperature > 0:
        raise EngineError(f"the temperature of log-probabilities must be above 0, not {temperature}")
    return Stats(*_stats(logits, targets, first, live, temperature))


def rebased(stats: Stats, top: torch.Tensor, temperature: float) -> Sums:
    """A shard's sums relative to `top` [N], the largest top of all shards: these add up over the shards."""
    down = (stats.top - top) / temperature
    keep = down.exp()
    return Sums(keep * stats.total, keep * (stats.weighted + down * stats.total), stats.picked)


def logprob_and_entropy(sums: Sums, top: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(target), entropy in nats), float32 [N], from the sums over all shards.

    log p(target) = (x[target] - m) / T - log S and H = log S - W / S, with S the total and W the weighted sum.
    """
    log_total = sums.total.log()
    return (sums.picked - top) / temperature - log_total, log_total - sums.weighted / sums.total
