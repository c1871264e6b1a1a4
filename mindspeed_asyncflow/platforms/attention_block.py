"""Causal attention over one block of keys with what is needed to join it with others: the log-sum-exp of its scores.

A pair of functions for one step of a ring: npu_fusion_attention and its gradient on an NPU, torch elsewhere. Neither
builds a graph for autograd.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mindspeed_asyncflow.platforms.kernels import causal_mask, sample_parts, torch_npu_for
from mindspeed_asyncflow.platforms.packing import Bucket, PackedLayout

SCORES_AT_ONCE = 1 << 20  # elements of a matrix of scores in torch, so that it stays in a processor's cache ...
QUERIES_AT_ONCE = 64  # ... unless so few queries would be left of long samples


def wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results are kept in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def block_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, Nq, Dv] and log-sum-exp of the scores [T, Nq], which is fp32 (fp64 for fp64).

    q: [T, Nq, D]; k: [T, Nkv, D]; v: [T, Nkv, Dv] with Nkv dividing Nq; query i of a sample sees its keys 0 to i.
    """
    if torch_npu_for(q, "attention_packed") is not None:
        return _npu_forward(q, k, v, layout, scale)
    slots = layout.padded(q), layout.padded(k), layout.padded(v)
    outs, logs = [], []
    for bucket in layout.buckets:
        bq, bk, bv = (_rows(t, bucket, k.shape[1]) for t in slots)
        out, log = bq.new_empty(*bq.shape[:-1], v.shape[2]), bq.new_empty(bq.shape[:-1])
        for part, scores in _scores(bq, bk, scale):
            log[..., part] = torch.logsumexp(scores, -1)
            weights = scores.sub_(log[..., part, None]).exp_()
            out[..., part, :] = _over_keys(weights, bv[:, :, 0, : weights.shape[-1]])
        outs.append(_tokens(out))
        logs.append(_tokens(log[..., None]))
    out, log = (torch.cat(parts) for parts in (outs, logs))
    return layout.unpadded(out), layout.unpadded(log).squeeze(-1)


def block_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log: torch.Tensor,
    layout: PackedLayout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v for this block, where `out` and `log` are those of the queries over *all* blocks.

    grad, out: [T, Nq, Dv] in the type of q; log: [T, Nq].
    """
    if torch_npu_for(q, "attention_packed") is not None:
        return _npu_backward(grad, q, k, v, out, log, layout, scale)
    inner = (grad.to(log.dtype) * out).sum(-1, keepdim=True)
    # what comes from a slot of padding must not reach the keys
    slots = [layout.padded(t) for t in (q, k, v)]
    slots += [layout.padded(grad, zero=True), layout.padded(inner, zero=True), layout.padded(log[..., None])]
    found: list[list[torch.Tensor]] = [[], [], []]
    for bucket in layout.buckets:
        bq, bk, bv, bgrad, binner, blog = (_rows(t, bucket, k.shape[1]) for t in slots)
        dq, dk, dv = torch.empty_like(bq), torch.zeros_like(bk), torch.zeros_like(bv)
        for part, scores in _scores(bq, bk, scale):
            seen = slice(0, scores.shape[-1])
            weights = scores.sub_(blog[..., part, :]).exp_()
            dv[:, :, 0, seen] += _over_queries(weights, bgrad[..., part, :])
            dscores = _over_keys(bgrad[..., part, :], bv[:, :, 0, seen].mT)
            dscores.sub_(binner[..., part, :]).mul_(weights).mul_(scale)
            dq[..., part, :] = _over_keys(dscores, bk[:, :, 0, seen])
            dk[:, :, 0, seen] += _over_queries(dscores, bq[..., part, :])
        for parts, t in zip(found, (dq, dk, dv)):
            parts.append(_tokens(t))
    dq, dk, dv = (layout.unpadded(torch.cat(parts)) for parts in found)
    return dq, dk, dv


def _rows(slots: torch.Tensor, bucket: Bucket, groups: int) -> torch.Tensor:
    """[P, N, D] -> [B, groups, N / groups, L, D] of a bucket, wide."""
    rows = slots[bucket.start : bucket.start + bucket.rows * bucket.length].to(wide(slots.dtype))
    return rows.view(bucket.rows, bucket.length, groups, -1, slots.shape[2]).permute(0, 2, 3, 1, 4).contiguous()


def _tokens(rows: torch.Tensor) -> torch.Tensor:
    """[B, groups, N / groups, L, D] -> [B * L, N, D]"""
    return rows.permute(0, 3, 1, 2, 4).reshape(rows.shape[0] * rows.shape[3], -1, rows.shape[4])


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Pieces of queries and their scores [B, Nkv, G, l, m] over the keys that any of them sees."""
    length = q.shape[3]
    step = max(QUERIES_AT_ONCE, SCORES_AT_ONCE // q[..., 0].numel())
    for first in range(0, length, step):
        part = slice(first, min(first + step, length))
        scores = _over_keys(q[..., part, :], k[:, :, 0, : part.stop].mT).mul_(scale)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + first)
        yield part, scores.masked_fill_(later, float("-inf"))


def _over_keys(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[B, Nkv, G, l, m] @ [B, Nkv, m, d] -> [B, Nkv, G, l, d], one product for all G heads of a key."""
    return (x.flatten(2, 3) @ y).view(*x.shape[:-1], y.shape[-1])


def _over_queries(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[B, Nkv, G, l, m] and [B, Nkv, G, l, d] -> [B, Nkv, m, d], the sum over queries and heads of a key."""
    return x.flatten(2, 3).mT @ y.flatten(2, 3)


# ---- NPU -------------------------------------------------------------------------------------------------------------


def _npu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    npu = torch_npu_for(q, "attention_packed")
    assert npu is not None
    outs, logs = [], []
    for part, ends in sample_parts(layout.lengths):
        out, top, total = npu.npu_fusion_attention(
            q[part],
            k[part],
            v[part],
            q.shape[1],
            "TND",
            atten_mask=causal_mask(q.device),
            scale=scale,
            keep_prob=1.0,
            sparse_mode=3,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
            softmax_layout="TND",
        )[:3]
        outs.append(out)
        logs.append(top[..., 0] + total[..., 0].log())  # [T, Nq, 8], eight times the same
    return torch.cat(outs), torch.cat(logs)


def _npu_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log: torch.Tensor,
    layout: PackedLayout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    npu = torch_npu_for(q, "attention_packed")
    assert npu is not None
    found = []
    for part, ends in sample_parts(layout.lengths):
        # the operator computes exp(score - max) / sum: the log-sum-exp of all blocks stands for the maximum
        top = log[part][..., None].expand(-1, -1, 8).contiguous()
        found.append(
            npu.npu_fusion_attention_grad(
                q[part],
                k[part],
                v[part],
                grad[part],
                q.shape[1],
                "TND",
                atten_mask=causal_mask(q.device),
                softmax_max=top,
                softmax_sum=torch.ones_like(top),
                attention_in=out[part],
                scale_value=scale,
                keep_prob=1.0,
                sparse_mode=3,
                actual_seq_qlen=ends,
                actual_seq_kvlen=ends,
                softmax_layout="TND",
            )[:3]
        )
    dq, dk, dv = (torch.cat(parts) for parts in zip(*found))
    return dq, dk, dv
