"""Which trainer rank writes which part of which weight into the relay. Pure.

Replicas hold the same boxes; every element of every tensor is written by exactly one rank, and ranks that hold the
same boxes share them evenly. The plan follows from the layout alone, so all ranks and the driver compute the same one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box, subtract, whole
from mindspeed_asyncflow.reshard.layout import Layout, Segment
from mindspeed_asyncflow.reshard.relay_table import RelayTable, make_table

# A box larger than this share of a rank's fair load is cut by rows over its holders. The fullest rank then has at most
# one such share more than the mean of the ranks that hold the same boxes.
_LARGEST = 1 / 8


@dataclass(frozen=True, slots=True)
class Write:
    """Local parameter `param` gives `segment.box` of the full tensor `segment.name`."""

    param: str
    segment: Segment


@dataclass(frozen=True, slots=True)
class WritePlan:
    """`shards`: the boxes of every full tensor, disjoint, together whole, by row and column; tensors in layer order.

    `ranks[r]`: what rank r writes, in layer order.
    """

    shards: dict[str, tuple[Box, ...]]
    ranks: tuple[tuple[Write, ...], ...]

    def table(self, layout: Layout, dtype: str) -> RelayTable:
        """What a relay holds whose tensors are stored as `dtype` (torch name), but those with a type of their own."""
        shapes = {name: tensor.shape for name, tensor in layout.tensors.items()}
        writers = {r: [(w.segment.name, w.segment.box) for w in writes] for r, writes in enumerate(self.ranks)}
        dtypes = {name: tensor.dtype or dtype for name, tensor in layout.tensors.items()}
        return make_table(shapes, dtypes, writers)

    def elements(self, rank: int) -> int:
        return sum(write.segment.box.size for write in self.ranks[rank])


def write_plan(layout: Layout) -> WritePlan:
    """Raises `WeightSyncError` when some element lies on no rank."""
    holders = _holders(layout)
    total = sum(box.size for boxes in holders.values() for box in boxes)
    limit = max(1.0, total / layout.world_size * _LARGEST)
    shards: dict[str, tuple[Box, ...]] = {}
    pieces: list[tuple[int, int, Box, list[tuple[int, Write]]]] = []  # size, place in layer order, box, who could
    for place, (name, boxes) in enumerate(holders.items()):
        cut = [(part, who) for box, who in boxes.items() for part in _cut(box, min(len(who), int(box.size / limit)))]
        shards[name] = tuple(sorted(part for part, _ in cut))
        pieces += [(part.size, place, part, who) for part, who in cut]
    pieces.sort(key=lambda p: (len(p[3]) > 1, -p[0], p[1], p[2]))  # first those without a choice, then the largest
    load = [0] * layout.world_size
    mine: list[list[tuple[int, Box, Write]]] = [[] for _ in load]
    for size, place, box, who in pieces:
        rank, write = min(who, key=lambda w: load[w[0]])
        load[rank] += size
        mine[rank].append((place, box, _part(write, box)))
    return WritePlan(shards, tuple(tuple(write for *_, write in sorted(m, key=lambda x: x[:2])) for m in mine))


def _holders(layout: Layout) -> dict[str, dict[Box, list[tuple[int, Write]]]]:
    """For every tensor disjoint boxes that are together whole, and the ranks that hold each of them."""
    found: dict[str, dict[Box, list[tuple[int, Write]]]] = {name: {} for name in layout.tensors}
    for rank, params in enumerate(layout.ranks):
        for param in params:
            for segment in param.segments:
                found[segment.name].setdefault(segment.box, []).append((rank, Write(param.name, segment)))
    exact: dict[str, dict[Box, list[tuple[int, Write]]]] = {}
    for name, boxes in found.items():
        left, exact[name] = [whole(layout.tensors[name].shape)], {}
        for box in sorted(boxes):
            for part in [common for free in left if (common := box.meet(free))]:
                exact[name][part] = boxes[box]
            left = [rest for free in left for rest in subtract(free, box)]
        if left:
            raise WeightSyncError(
                f"layout {layout.label}: rows {left[0].r0} to {left[0].r1} of {name!r} lie on no rank"
            )
    return exact


def _cut(box: Box, count: int) -> list[Box]:
    """`box` in `count` parts of about equally many rows."""
    count = max(1, min(count, box.rows))
    edges = [box.r0 + box.rows * i // count for i in range(count + 1)]
    return [Box(r0, r1, box.c0, box.c1) for r0, r1 in itertools.pairwise(edges)]


def _part(write: Write, box: Box) -> Write:
    """`write` of `box` only, a part of its own box."""
    segment = write.segment
    row, col = segment.row + box.r0 - segment.box.r0, segment.col + box.c0 - segment.box.c0
    return Write(write.param, Segment(segment.name, box, row, col))
