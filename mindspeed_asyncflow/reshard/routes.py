"""Who sends a piece to whom: over each slow link once, spread over the ranks that hold it. Pure.

A piece crosses into a superpod once and into a node once; the rank that receives it there passes it on. That is the
least that any transfer can do on each kind of link, and every rank receives each of its pieces exactly once.
"""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_asyncflow.reshard.topology import Topology

ACROSS_SUPERPODS, ACROSS_NODES, INSIDE_NODE = 0, 1, 2
STEPS = 3


class Hop(NamedTuple):
    step: int  # hops of a step start when the step before is over
    source: int
    target: int


class _Node(NamedTuple):
    holders: tuple[int, ...]
    needers: tuple[int, ...]  # without holders


class _Superpod(NamedTuple):
    holders: tuple[int, ...]
    nodes: tuple[_Node, ...]  # those with needers


class Demand(NamedTuple):
    """How the holders and needers of a piece lie in the topology."""

    local: tuple[int, ...]  # needers that hold the piece themselves
    superpods: tuple[_Superpod, ...]  # those with other needers

    @property
    def least(self) -> tuple[int, int, int]:
        """Fewest times that the piece must cross (between superpods, between nodes, in all)."""
        nodes = [(superpod, node) for superpod in self.superpods for node in superpod.nodes]
        return (
            sum(not superpod.holders for superpod in self.superpods),
            sum(not node.holders for _, node in nodes),
            sum(len(node.needers) for _, node in nodes),
        )


class Router:
    """Chooses hops; remembers how much every rank has sent, so that load is even over equal holders."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.sent = [0] * topology.world_size  # bytes so far
        self._demands: dict[tuple[tuple[int, ...], tuple[int, ...]], Demand] = {}

    def demand(self, holders: tuple[int, ...], needers: tuple[int, ...]) -> Demand:
        key = (holders, needers)
        if key not in self._demands:
            self._demands[key] = self._arrange(holders, needers)
        return self._demands[key]

    def _arrange(self, holders: tuple[int, ...], needers: tuple[int, ...]) -> Demand:
        node_of, superpod_of = self.topology.node_of, self.topology.superpod_of
        having = set(holders)
        missing: dict[int, dict[int, list[int]]] = {}
        for rank in needers:
            if rank not in having:
                missing.setdefault(superpod_of[rank], {}).setdefault(node_of[rank], []).append(rank)
        superpods = []
        for superpod, nodes in missing.items():
            inside = tuple(h for h in holders if superpod_of[h] == superpod)
            parts = [
                _Node(tuple(h for h in inside if node_of[h] == node), tuple(found)) for node, found in nodes.items()
            ]
            superpods.append(_Superpod(inside, tuple(parts)))
        return Demand(tuple(rank for rank in needers if rank in having), tuple(superpods))

    def route(self, holders: tuple[int, ...], demand: Demand, nbytes: int) -> list[Hop]:
        hops: list[Hop] = []
        for superpod in demand.superpods:
            near = superpod.holders
            entry = -1  # the rank that got the piece from another superpod
            if not near:
                node = min(superpod.nodes, key=lambda n: min(self.sent[r] for r in n.needers))
                entry = self._idlest(node.needers)
                hops.append(self._hop(ACROSS_SUPERPODS, holders, entry, nbytes))
                near = (entry,)
            for node in superpod.nodes:
                self._into_node(node, near, entry, nbytes, hops)
        return hops

    def _into_node(self, node: _Node, near: tuple[int, ...], entry: int, nbytes: int, hops: list[Hop]) -> None:
        here = list(node.holders)
        if entry in node.needers:
            here.append(entry)
        if not here:
            entry = self._idlest(node.needers)
            hops.append(self._hop(ACROSS_NODES, near, entry, nbytes))
            here.append(entry)
        for rank in node.needers:
            if rank != entry:
                hops.append(self._hop(INSIDE_NODE, here, rank, nbytes))

    def _hop(self, step: int, holders: tuple[int, ...] | list[int], target: int, nbytes: int) -> Hop:
        source = self._idlest(holders)
        self.sent[source] += nbytes
        return Hop(step, source, target)

    def _idlest(self, ranks: tuple[int, ...] | list[int]) -> int:
        return ranks[0] if len(ranks) == 1 else min(ranks, key=self.sent.__getitem__)
