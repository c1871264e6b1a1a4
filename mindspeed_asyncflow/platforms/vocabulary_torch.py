"""The vocabulary operator in torch, a few rows at a time: never a full fp32 copy of the logits, nor of their softmax.

With x the row's logits, T the temperature, m = max x and y = (x - m) / T, a row has
    top = m, total = sum exp(y), weighted = sum exp(y) * y, picked = x[target]   (0 where another shard holds it)
and d total / dx = exp(y) / T, d weighted / dx = exp(y) * (1 + y) / T, while m counts as a constant: what is computed
from the four does not change when m does.
"""

from __future__ import annotations

import torch

ABSENT = -1e30  # top of a shard that is all padding; finite, since 0 * (-inf) would be nan
# Logits widened at once. A processor wants them in its second-level cache, a device few launches.
CHUNK_ON_CPU = 1 << 19
CHUNK_ON_DEVICE = 1 << 25


def stats(
    logits: torch.Tensor, targets: torch.Tensor, first: int, live: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(top, total, weighted, picked), each float32 [N]; arguments as in `vocabulary.vocabulary_stats`."""
    rows = len(logits)
    top = logits.new_full((rows,), ABSENT, dtype=torch.float32)
    total, weighted, picked = (torch.zeros_like(top) for _ in range(3))
    if live == 0:
        return top, total, weighted, picked
    step = _rows_at_once(logits, live)
    y, e = (torch.empty((step, live), dtype=torch.float32, device=logits.device) for _ in range(2))
    column, mine = _columns(targets, first, live)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        x = logits[part, :live]
        ys, es = y[: len(x)], e[: len(x)]
        if x.dtype != torch.float32:
            x = ys.copy_(x)
        torch.amax(x, 1, out=top[part])
        picked[part] = x.gather(1, column[part]).squeeze(1) * mine[part]
        torch.sub(x, top[part].unsqueeze(1), out=ys)
        if temperature != 1.0:
            ys.mul_(1.0 / temperature)
        torch.exp(ys, out=es)
        torch.sum(es, 1, out=total[part])
        torch.linalg.vecdot(es, ys, out=weighted[part])
    return top, total, weighted, picked


def gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    top: torch.Tensor,
    by_total: torch.Tensor,
    by_weighted: torch.Tensor | None,
    by_picked: torch.Tensor,
    first: int,
    live: int,
    temperature: float,
) -> torch.Tensor:
    """dL/d logits in their type, [N, V/tp]; arguments as in `vocabulary.vocabulary_gradient`."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    out[:, live:] = 0
    if live == 0:
        return out
    step = _rows_at_once(logits, live)
    widened = logits.dtype != torch.float32  # else the result itself is the workspace
    spaces = int(widened) + int(by_weighted is not None)
    space = torch.empty((spaces, step, live), dtype=torch.float32, device=logits.device)
    column, mine = _columns(targets, first, live)
    factor = 1.0 / temperature
    by_total, by_picked = by_total * factor, by_picked * mine
    if by_weighted is not None:
        by_weighted = by_weighted * factor
        by_total = by_total + by_weighted
    for start in range(0, len(logits), step):
        part = slice(start, min(start + step, len(logits)))
        x = logits[part, :live]
        y = space[0, : len(x)] if widened else out[part, :live]
        if widened:
            x = y.copy_(x)
        torch.sub(x, top[part].unsqueeze(1), out=y)
        if temperature != 1.0:
            y.mul_(factor)
        if by_weighted is None:
            y.exp_().mul_(by_total[part].unsqueeze(1))
        else:
            e = torch.exp(y, out=space[-1, : len(x)])
            y.mul_(by_weighted[part].unsqueeze(1)).add_(by_total[part].unsqueeze(1)).mul_(e)
        y.scatter_add_(1, column[part], by_picked[part].unsqueeze(1))
        if widened:
            out[part, :live].copy_(y)
    return out


def _rows_at_once(logits: torch.Tensor, live: int) -> int:
    chunk = CHUNK_ON_CPU if logits.device.type == "cpu" else CHUNK_ON_DEVICE
    return max(1, min(len(logits), chunk // live))


def _columns(targets: torch.Tensor, first: int, live: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 [N, 1] column of each target, or 0; bool [N]: this shard holds it)"""
    local = targets - first
    mine = (local >= 0) & (local < live)
    return torch.where(mine, local, 0).unsqueeze(1), mine
