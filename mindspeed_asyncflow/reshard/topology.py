"""Which ranks share a node, and which nodes share a superpod. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_asyncflow.errors import ConfigError

LINKS = ("local", "node", "superpod", "roce")  # no link at all; inside a node; over HCCS; between superpods


@dataclass(frozen=True, slots=True)
class Topology:
    """Places by global rank. Nodes are numbered over all superpods."""

    node_of: tuple[int, ...]
    superpod_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.node_of) != len(self.superpod_of):
            raise ConfigError(f"{len(self.node_of)} ranks have a node, {len(self.superpod_of)} a superpod")
        home: dict[int, int] = {}
        for node, superpod in zip(self.node_of, self.superpod_of):
            if home.setdefault(node, superpod) != superpod:
                raise ConfigError(f"node {node} lies in superpods {home[node]} and {superpod}")

    @classmethod
    def regular(cls, ranks: int, per_node: int, nodes_per_superpod: int | None = None) -> Topology:
        """Ranks fill nodes, nodes fill superpods; None: one superpod."""
        nodes = tuple(rank // per_node for rank in range(ranks))
        return cls(nodes, tuple(0 if nodes_per_superpod is None else node // nodes_per_superpod for node in nodes))

    @property
    def world_size(self) -> int:
        return len(self.node_of)

    def link(self, a: int, b: int) -> str:
        """The kind of link between two ranks, one of `LINKS`."""
        if a == b:
            return "local"
        if self.superpod_of[a] != self.superpod_of[b]:
            return "roce"
        return "node" if self.node_of[a] == self.node_of[b] else "superpod"
