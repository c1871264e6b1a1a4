"""Two layouts laid over each other: the pieces that move, with who holds each and who needs it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box
from mindspeed_asyncflow.reshard.layout import Layout

Holding = dict[str, dict[Box, tuple[int, ...]]]  # tensor -> box -> ranks that hold exactly this box


class Piece(NamedTuple):
    """`box` of tensor `name` lies complete on every rank of `holders` and goes to every rank of `needers`."""

    name: str
    box: Box
    holders: tuple[int, ...]  # global ranks, ascending
    needers: tuple[int, ...]


def holding(layout: Layout, first: int = 0) -> Holding:
    """Every box of every tensor with the global ranks that hold it; rank i of the layout is `first` + i."""
    ranks_of: dict[int, list[int]] = {}
    for rank, params in enumerate(layout.ranks):
        ranks_of.setdefault(id(params), []).append(first + rank)
    params_of = {id(params): params for params in layout.ranks}
    found: dict[str, dict[Box, list[int]]] = {}
    for key, params in params_of.items():
        for param in params:
            for segment in param.segments:
                found.setdefault(segment.name, {}).setdefault(segment.box, []).extend(ranks_of[key])
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal tuples are one object: cheap to keep and to compare

    def ascending(ranks: list[int]) -> tuple[int, ...]:
        ordered = tuple(sorted(set(ranks)))
        return shared.setdefault(ordered, ordered)

    return {name: {box: ascending(ranks) for box, ranks in boxes.items()} for name, boxes in found.items()}


def pieces(source: Layout, target: Layout, target_first: int = 0) -> Iterator[Piece]:
    """All pieces in the target's tensor order; together they are exactly what the target holds.

    Raises `WeightSyncError` when the target wants something that no source rank holds.
    """
    have, want = holding(source), holding(target, target_first)
    for name in target.tensors:
        if name in want:
            yield from _tensor_pieces(name, have.get(name, {}), want[name])


def _tensor_pieces(name: str, have: dict[Box, tuple[int, ...]], want: dict[Box, tuple[int, ...]]) -> Iterator[Piece]:
    boxes = [*have, *want]
    rows = sorted({edge for box in boxes for edge in (box.r0, box.r1)})
    cols = sorted({edge for box in boxes for edge in (box.c0, box.c1)})
    for c0, c1 in pairwise(cols):
        last: Piece | None = None
        for r0, r1 in pairwise(rows):
            cell = Box(r0, r1, c0, c1)
            needers = _ranks(want, cell)
            if not needers:
                continue
            holders = _ranks(have, cell)
            if not holders:
                raise WeightSyncError(
                    f"{name!r} rows {r0} to {r1}, columns {c0} to {c1}: wanted by rank {needers[0]}, held by no rank"
                )
            if last is not None and last.box.r1 == r0 and last.holders == holders and last.needers == needers:
                last = last._replace(box=last.box._replace(r1=r1))
                continue
            if last is not None:
                yield last
            last = Piece(name, cell, holders, needers)
        if last is not None:
            yield last


def _ranks(holding: dict[Box, tuple[int, ...]], cell: Box) -> tuple[int, ...]:
    """Ranks with a box that covers `cell`; a cell of the common grid is covered or not touched at all."""
    covering = [
        ranks
        for box, ranks in holding.items()
        if box.r0 <= cell.r0 and cell.r1 <= box.r1 and box.c0 <= cell.c0 and cell.c1 <= box.c1
    ]
    if len(covering) == 1:
        return covering[0]
    return tuple(sorted(set().union(*covering)))
