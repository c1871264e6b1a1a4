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
class MirrorOfNode:
    """The mirror file of a node with replicas, and who loads from it."""

    ip: str
    path: str
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Relays:
    ranks: tuple[RelayOfRank, ...]  # of every trainer rank
    servers: dict[int, str]  # the rank that serves its node's relay -> address to listen on
    mirrors: tuple[MirrorOfNode, ...]


def over_loopback(places: Mapping[str, Place]) -> dict[str, Place]:
    """The same places; where one node has all of them, processes listen where nobody else can reach them."""
    if len({place.node for place in places.values()}) > 1:
        return dict(places)
    return {name: Place(place.node, "127.0.0.1") for name, place in places.items()}


def plan_relays(trainers: Sequence[Place], replicas: Sequence[Place], *, always_mirror: bool = False) -> Relays:
    """Places of the trainer ranks and of the replicas -> what to start. One mirror for all replicas of a node."""
    at = _by_node(trainers)
    files = {node: RelayOfRank(shm_path(f"relay{i}"), ranks) for i, (node, ranks) in enumerate(at.items())}
    whole = next(iter(at)) if len(at) == 1 and not always_mirror else None  # where one file has all shards
    mirrors = tuple(
        MirrorOfNode(replicas[here[0]].ip, shm_path(f"mirror{i}"), here)
        for i, (node, here) in enumerate(_by_node(replicas).items())
        if node != whole
    )
    servers = {file.writers[0]: trainers[file.writers[0]].ip for file in files.values()} if mirrors else {}
    return Relays(tuple(files[place.node] for place in trainers), servers, mirrors)


def _by_node(places: Sequence[Place]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for index, place in enumerate(places):
        found[place.node] = (*found.get(place.node, ()), index)
    return found
