"""From one layout to another: who sends which box to whom, in which bucket. Made before a byte moves. Pure.

Tensors go in layer order. Inside a layer, pieces alternate between the ranks that hold them, so that all of these send
at once; with `across_stages` the n-th layers of all pipeline stages go together, so that all stages do. A bucket is as
many pieces as fit: on no rank do the bytes that it sends and receives in one bucket exceed `bucket_bytes`, so that one
staging buffer of that size serves the whole transfer. Inside a bucket the steps of `routes.py` follow each other.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.reshard.boxes import Box
from mindspeed_asyncflow.reshard.layout import Layout
from mindspeed_asyncflow.reshard.pieces import Piece, pieces
from mindspeed_asyncflow.reshard.routes import INSIDE_NODE, STEPS, Demand, Hop, Router
from mindspeed_asyncflow.reshard.topology import LINKS, Topology


class Move(NamedTuple):
    """`box` of the full tensor `name` goes to, or comes from, global rank `peer` (a copy: the rank itself)."""

    name: str
    box: Box
    peer: int


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank does in one step. Moves between two ranks have the same order on both sides."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    copies: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class RankBucket:
    number: int
    steps: tuple[RankStep, ...]  # later steps may send on what earlier ones received


@dataclass(frozen=True)
class Plan:
    """All moves, as columns of equal length, ordered by (bucket, step, tensor)."""

    names: tuple[str, ...]  # tensors, in transfer order
    tensor: np.ndarray  # int32, index into names
    boxes: np.ndarray  # int32 [M, 4]
    source: np.ndarray  # int32, global ranks
    target: np.ndarray  # int32; equal to source: a local copy
    step: np.ndarray  # int8
    bucket: np.ndarray  # int32
    itemsize: int  # bytes of an element on the wire
    bucket_bytes: int
    topology: Topology
    least_crossings: tuple[int, int, int]  # bytes: between superpods, between nodes, in all

    @property
    def buckets(self) -> int:
        return int(self.bucket[-1]) + 1 if len(self.bucket) else 0

    @property
    def nbytes(self) -> np.ndarray:
        """int64 [M], bytes of each move: rows * columns * itemsize."""
        box = self.boxes.astype(np.int64)
        return (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2]) * self.itemsize

    def for_rank(self, rank: int) -> list[RankBucket]:
        """The part of one rank, in order; buckets in which it has nothing to do are left out."""
        mine = np.flatnonzero((self.source == rank) | (self.target == rank))
        found: dict[int, dict[int, tuple[list[Move], list[Move], list[Move]]]] = {}
        for i in mine.tolist():
            source, target = int(self.source[i]), int(self.target[i])
            lists = found.setdefault(int(self.bucket[i]), {}).setdefault(int(self.step[i]), ([], [], []))
            move = (self.names[self.tensor[i]], Box(*self.boxes[i].tolist()))
            if source == target:
                lists[2].append(Move(*move, rank))
            elif source == rank:
                lists[0].append(Move(*move, target))
            else:
                lists[1].append(Move(*move, source))
        return [
            RankBucket(number, tuple(RankStep(*map(tuple, steps[s])) for s in sorted(steps)))
            for number, steps in sorted(found.items())
        ]

    def sent_bytes(self) -> np.ndarray:
        """int64 [world], bytes that each rank sends."""
        return self._per_rank(self.source)

    def received_bytes(self) -> np.ndarray:
        """int64 [world], bytes that each rank receives."""
        return self._per_rank(self.target)

    def copied_bytes(self) -> np.ndarray:
        """int64 [world], bytes that each rank takes from its own shard."""
        local = self.source == self.target
        return np.bincount(self.target[local], self.nbytes[local], self.topology.world_size).astype(np.int64)

    def _per_rank(self, ranks: np.ndarray) -> np.ndarray:
        moving = self.source != self.target
        return np.bincount(ranks[moving], self.nbytes[moving], self.topology.world_size).astype(np.int64)

    def links(self) -> np.ndarray:
        """int8 [M], index into `LINKS` of the link that each move takes."""
        node, superpod = np.array(self.topology.node_of), np.array(self.topology.superpod_of)
        links = np.where(node[self.source] == node[self.target], 1, 2)
        links = np.where(superpod[self.source] == superpod[self.target], links, 3)
        return np.where(self.source == self.target, 0, links).astype(np.int8)

    def link_bytes(self) -> dict[str, int]:
        """Bytes over each kind of link; "local" are copies inside a rank."""
        totals = np.bincount(self.links(), self.nbytes, len(LINKS))
        return {link: int(total) for link, total in zip(LINKS, totals)}

    def lower_bound(self) -> dict[str, int]:
        """Fewest bytes that any transfer between these layouts moves, by link.

        "roce": every byte once into each superpod that needs and does not hold it; "superpod": the same for nodes, less
        the former; "node": every byte once into each rank that needs and does not hold it, less both.
        """
        superpods, nodes, ranks = self.least_crossings
        return {"node": ranks - nodes, "superpod": nodes - superpods, "roce": superpods}

    def over_lower_bound(self) -> float:
        """The worst ratio of bytes moved to the lower bound, over RoCE, out of nodes, and in all; 1 where none move."""
        moved = self.link_bytes()
        superpods, nodes, ranks = self.least_crossings
        ratios = [1.0]
        for actual, least in (
            (moved["roce"], superpods),
            (moved["roce"] + moved["superpod"], nodes),
            (moved["roce"] + moved["superpod"] + moved["node"], ranks),
        ):
            if actual or least:
                ratios.append(actual / least if least else math.inf)
        return max(ratios)

    def peak_bucket_bytes(self) -> np.ndarray:
        """int64 [world], most bytes that each rank sends and receives in one bucket."""
        world = self.topology.world_size
        moving = self.source != self.target
        nbytes, bucket = self.nbytes[moving], self.bucket[moving].astype(np.int64)
        ends = np.concatenate([bucket * world + self.source[moving], bucket * world + self.target[moving]])
        totals = np.bincount(ends, np.concatenate([nbytes, nbytes]), max(1, self.buckets) * world)
        return totals.reshape(-1, world).max(axis=0).astype(np.int64)


def make_plan(
    source: Layout,
    target: Layout,
    *,
    itemsize: int,
    bucket_bytes: int,
    topology: Topology | None = None,
    target_first: int = 0,
    across_stages: bool = False,
) -> Plan:
    """Plan the moves from `source` to `target`.

    Rank i of `source` is global rank i, rank j of `target` is `target_first` + j: 0 where both share devices,
    `source.world_size` where they are apart. `itemsize`: bytes of an element on the wire. Raises `WeightSyncError`
    when the target wants what nobody holds, `ConfigError` for a bucket that is too small or a topology of another size.
    """
    limits = (("itemsize", itemsize, 1), ("bucket_bytes", bucket_bytes, 1), ("target_first", target_first, 0))
    for name, value, least in limits:
        if value < least:
            raise ConfigError(f"{name}={value} must be at least {least}")
    world = max(source.world_size, target_first + target.world_size)
    topology = topology or Topology.regular(world, world)
    if topology.world_size != world:
        raise ConfigError(f"the topology has {topology.world_size} ranks, source and target have {world}")
    maker = _Maker(target, topology, itemsize, bucket_bytes)
    for wave in _waves(target, pieces(source, target, target_first), across_stages):
        for piece in _alternating(wave):
            maker.add(piece)
    return maker.finish()


def _waves(target: Layout, found: Iterable[Piece], across_stages: bool) -> Iterator[list[Piece]]:
    """Pieces that may go at the same time: those of one layer, or of one layer from each set of holding ranks."""
    layers = [list(layer) for _, layer in groupby(found, key=lambda piece: target.tensors[piece.name].order)]
    if not across_stages:
        yield from layers
        return
    turns: Counter[int] = Counter()  # layers so far by the first rank that holds them, i.e. by stage
    waves: dict[int, list[Piece]] = {}
    for layer in layers:
        stage = layer[0].holders[0]
        waves.setdefault(turns[stage], []).extend(layer)
        turns[stage] += 1
    yield from waves.values()


def _alternating(wave: Iterable[Piece]) -> list[Piece]:
    """The pieces in turns: one of every set of holders, then the next of every set."""
    turns: Counter[tuple[int, ...]] = Counter()
    ordered: list[tuple[int, int, Piece]] = []
    for number, piece in enumerate(wave):
        ordered.append((turns[piece.holders], number, piece))
        turns[piece.holders] += 1
    return [piece for _, _, piece in sorted(ordered)]


class _Maker:
    def __init__(self, target: Layout, topology: Topology, itemsize: int, bucket_bytes: int) -> None:
        self.names = tuple(target.tensors)
        self.number = {name: i for i, name in enumerate(self.names)}
        self.topology, self.itemsize, self.bucket_bytes = topology, itemsize, bucket_bytes
        self.router = Router(topology)
        self.columns = [array("i") for _ in range(9)]  # tensor, r0, r1, c0, c1, source, target, step, bucket
        self.bucket = 0
        self.staged: Counter[int] = Counter()  # bytes of the current bucket by rank
        self.least = [0, 0, 0]

    def add(self, piece: Piece) -> None:
        demand = self.router.demand(piece.holders, piece.needers)
        nbytes = piece.box.size * self.itemsize
        for i, crossings in enumerate(demand.least):
            self.least[i] += crossings * nbytes
        hops = self.router.route(piece.holders, demand, nbytes)
        ends = Counter(hop.source for hop in hops)
        ends.update(hop.target for hop in hops)
        for part in self._cut(piece, max(ends.values(), default=0)):
            self._place(piece.name, part, hops, demand, ends)

    def _cut(self, piece: Piece, copies: int) -> Iterator[Box]:
        """Parts so small that even the busiest rank of the piece stays inside a bucket."""
        if copies * piece.box.size * self.itemsize <= self.bucket_bytes:
            return iter([piece.box])
        most = self.bucket_bytes // (copies * self.itemsize)
        if most == 0:
            raise ConfigError(
                f"bucket_bytes={self.bucket_bytes} cannot hold one element of {piece.name!r}, which a rank sends and "
                f"receives {copies} times; give at least {copies * self.itemsize}"
            )
        return _parts(piece.box, most)

    def _place(self, name: str, box: Box, hops: list[Hop], demand: Demand, ends: Counter[int]) -> None:
        nbytes = box.size * self.itemsize
        if any(self.staged[rank] + count * nbytes > self.bucket_bytes for rank, count in ends.items()):
            self.bucket += 1
            self.staged.clear()
        for rank, count in ends.items():
            self.staged[rank] += count * nbytes
        moves = [*hops, *(Hop(INSIDE_NODE, rank, rank) for rank in demand.local)]
        count = len(moves)
        tensor, r0, r1, c0, c1, source, target, step, bucket = self.columns
        for column, value in zip((tensor, r0, r1, c0, c1, bucket), (self.number[name], *box, self.bucket)):
            column.extend([value] * count)
        step.extend([hop.step for hop in moves])
        source.extend([hop.source for hop in moves])
        target.extend([hop.target for hop in moves])

    def finish(self) -> Plan:
        tensor, r0, r1, c0, c1, source, target, step, bucket = (np.array(c, dtype=np.int32) for c in self.columns)
        order = np.argsort(bucket.astype(np.int64) * STEPS + step, kind="stable")
        return Plan(
            names=self.names,
            tensor=tensor[order],
            boxes=np.stack([r0, r1, c0, c1], axis=1)[order],
            source=source[order],
            target=target[order],
            step=step[order].astype(np.int8),
            bucket=bucket[order],
            itemsize=self.itemsize,
            bucket_bytes=self.bucket_bytes,
            topology=self.topology,
            least_crossings=(self.least[0], self.least[1], self.least[2]),
        )


def _parts(box: Box, most: int) -> Iterator[Box]:
    """`box` in parts of at most `most` elements: whole rows where one fits, else pieces of rows."""
    rows = most // box.cols
    if rows:
        for start in range(box.r0, box.r1, rows):
            yield box._replace(r0=start, r1=min(start + rows, box.r1))
        return
    for row in range(box.r0, box.r1):
        for start in range(box.c0, box.c1, most):
            yield Box(row, row + 1, start, min(start + most, box.c1))
