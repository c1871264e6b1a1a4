"""Ring attention over packed samples: keys and values go round the context-parallel ranks, queries stay.

Each round sends the block that is held on to the next rank while it is computed with. Partial results are joined by
their log-sum-exp in fp32. In the backward pass the gradient of a block travels behind it and ends at its owner.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from mindspeed_asyncflow.platforms.attention_block import block_backward, block_forward, wide
from mindspeed_asyncflow.platforms.striping import RingLayout


class Coming(Protocol):
    def wait(self) -> torch.Tensor:
        """What the rank before has sent, as soon as it is here and what this rank sent has left."""
        ...


class Ring(Protocol):
    """Ranks in a circle. All of them make the same calls in the same order."""

    def shift(self, tensor: torch.Tensor) -> Coming:
        """Start to send to the next rank, and to receive an equal shape from the one before. `tensor` must not change
        until the wait."""
        ...


class GroupRing:
    """The ranks of a process group. The deadline of a wait is that of the group."""

    def __init__(self, group: Any) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._next, self._before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._group = group

    def shift(self, tensor: torch.Tensor) -> Coming:
        received = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, self._next, self._group),
                dist.P2POp(dist.irecv, received, self._before, self._group),
            ]
        )
        return _Coming(works, tensor, received)


class _Coming:
    def __init__(self, works: list[Any], sent: torch.Tensor, received: torch.Tensor) -> None:
        self._works, self._sent, self._received = works, sent, received  # `sent` lives until it has left

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        return self._received


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: RingLayout, scale: float, ring: Ring
) -> torch.Tensor:
    """Causal attention inside each sample, over the keys of all ranks.

    q: [T/cp, Nq, D]; k: [T/cp, Nkv, D]; v: [T/cp, Nkv, Dv], the stripe of this rank, with Nkv dividing Nq; returns
    [T/cp, Nq * Dv].
    """
    return _RingAttention.apply(q, k, v, layout, scale, ring).flatten(1)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: RingLayout, scale: float, ring: Ring
    ) -> torch.Tensor:
        own = torch.cat((k, v), dim=-1)  # one message
        block = own
        out = torch.zeros(*q.shape[:2], v.shape[2], dtype=wide(q.dtype), device=q.device)
        log = torch.full(q.shape[:2], float("-inf"), dtype=out.dtype, device=q.device)
        last = len(layout.rounds) - 1
        for step, around in enumerate(layout.rounds):
            coming = ring.shift(block) if step < last else None
            if around.layout is not None:
                keys, values = _taken(block, around.keys).split((k.shape[2], v.shape[2]), dim=-1)
                part = block_forward(
                    _taken(q, around.queries), keys.contiguous(), values.contiguous(), around.layout, scale
                )
                _join(out, log, *part, around.queries)
            if coming is not None:
                block = coming.wait()
        narrow = out.to(q.dtype)
        ctx.layout, ctx.scale, ctx.ring, ctx.sizes = layout, scale, ring, (k.shape[2], v.shape[2])
        ctx.save_for_backward(q, own, narrow, log)
        return narrow

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, block, out, log = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq = torch.zeros(q.shape, dtype=log.dtype, device=q.device)
        last = len(ctx.layout.rounds) - 1
        behind: Coming | None = None  # the gradient of the block, from the ranks that had it before
        for step, around in enumerate(ctx.layout.rounds):
            coming = ctx.ring.shift(block) if step < last else None
            dblock = torch.zeros(block.shape, dtype=log.dtype, device=q.device)
            if around.layout is not None:
                keys, values = _taken(block, around.keys).split(ctx.sizes, dim=-1)
                of_queries = (_taken(t, around.queries) for t in (grad, q, out, log))
                bgrad, bq, bout, blog = of_queries
                bdq, bdk, bdv = block_backward(
                    bgrad, bq, keys.contiguous(), values.contiguous(), bout, blog, around.layout, ctx.scale
                )
                _add(dq, bdq, around.queries)
                _add(dblock, torch.cat((bdk, bdv), dim=-1), around.keys)
            if behind is not None:
                dblock += behind.wait()
            behind = ctx.ring.shift(dblock)
            if coming is not None:
                block = coming.wait()
        assert behind is not None
        dk, dv = behind.wait().split(ctx.sizes, dim=-1)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


def _taken(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return x if index is None else x.index_select(0, index)


def _add(total: torch.Tensor, part: torch.Tensor, index: torch.Tensor | None) -> None:
    part = part.to(total.dtype)
    if index is None:
        total += part
    else:
        total.index_add_(0, index, part)  # an index has no token twice


def _join(
    out: torch.Tensor, log: torch.Tensor, part: torch.Tensor, part_log: torch.Tensor, index: torch.Tensor | None
) -> None:
    """Weigh `out` and `part` by the exponents of their log-sum-exp, in place."""
    old = _taken(log, index)
    new = torch.logaddexp(old, part_log)
    joined = _taken(out, index) * (old - new).exp()[..., None] + part * (part_log - new).exp()[..., None]
    if index is None:
        out.copy_(joined)
        log.copy_(new)
    else:
        out.index_copy_(0, index, joined)
        log.index_copy_(0, index, new)
