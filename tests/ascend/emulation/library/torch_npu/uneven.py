"""Shards of different lengths along dimension 0, which the device's backend takes (AllGatherV, ReduceScatterV) and gloo
does not."""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    import torch.distributed as dist

    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    def gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        lengths = {len(part) for part in parts if part.dim()}
        if len(lengths) < 2:
            return all_gather(parts, mine, group=group, async_op=async_op)
        padded = mine.new_zeros(max(lengths), *mine.shape[1:])
        padded[: len(mine)] = mine
        found = [torch.empty_like(padded) for _ in parts]
        all_gather(found, padded, group=group)
        for out, part in zip(parts, found):
            out.copy_(part[: len(out)])

    def scatter(
        mine: torch.Tensor,
        parts: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({len(part) for part in parts}) < 2:
            return reduce_scatter(mine, parts, op=op, group=group, async_op=async_op)
        whole = torch.cat(parts)
        dist.all_reduce(whole, op=op, group=group)
        start = sum(len(part) for part in parts[: dist.get_rank(group)])
        mine.copy_(whole[start : start + len(mine)])

    dist.all_gather, dist.reduce_scatter = gather, scatter
