"""Which relay files, servers and mirrors a run needs, from where its processes are.

trainers' node                                  another node
ranks ──write──► relay file ── server ──────►   mirror file ◄──map── replicas
                    ▲
                    └──map── replicas (if all trainer ranks are here; else they use a mirror too)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_asyncflow.service.cleanup import shm_path


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs."""

    node: str  # Ray's id of the node
    ip: str


@dataclass(frozen=True, slots=True)
class RelayOfRank:
    """The relay file of a trainer rank's node, and the ranks there that write it together."""

    path: str
    writers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Relays:
    ranks: tuple[RelayOfRank, ...]  # of every trainer rank
    servers: dict[int, str]  # the rank that can serve its node's relay to mirrors -> address to listen on
    whole: str  # Ray's id of the node where one file has all shards; "" where none has

    def maps(self, place: Place) -> bool:
        """Whether a replica there maps the relay; elsewhere it loads through a mirror of its node."""
        return place.node == self.whole


def over_loopback(places: Mapping[str, Place]) -> dict[str, Place]:
    """The same places; where one node has all of them, processes listen where nobody else can reach them."""
    if len({place.node for place in places.values()}) > 1:
        return dict(places)
    return {name: Place(place.node, "127.0.0.1") for name, place in places.items()}


def plan_relays(trainers: Sequence[Place], *, always_mirror: bool = False) -> Relays:
    """Places of the trainer ranks -> their files. `always_mirror`: replicas use one on the trainers' node too."""
    at: dict[str, tuple[int, ...]] = {}
    for rank, place in enumerate(trainers):
        at[place.node] = (*at.get(place.node, ()), rank)
    files = {node: RelayOfRank(shm_path(f"relay{i}"), ranks) for i, (node, ranks) in enumerate(at.items())}
    return Relays(
        ranks=tuple(files[place.node] for place in trainers),
        servers={file.writers[0]: trainers[file.writers[0]].ip for file in files.values()},
        whole=next(iter(at)) if len(at) == 1 and not always_mirror else "",
    )
