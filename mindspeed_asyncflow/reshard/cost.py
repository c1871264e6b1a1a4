"""How long a plan takes on given links, by a model: no measurement. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.reshard.plan import Plan
from mindspeed_asyncflow.reshard.routes import STEPS
from mindspeed_asyncflow.reshard.topology import LINKS


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Speed of one rank's connection in one direction, in bytes/s; `latency_s` is paid once per message."""

    node: float
    superpod: float
    roce: float
    copy: float  # inside a rank's own memory
    latency_s: float = 0.0

    def seconds_per_byte(self) -> np.ndarray:
        """float64 [4], by index into `LINKS`."""
        return 1.0 / np.array([self.copy, self.node, self.superpod, self.roce])


def modelled_seconds(plan: Plan, speeds: LinkSpeeds) -> float:
    """Seconds of the whole plan: sum over buckets and steps of the time of the busiest rank.

    A rank's time in a step is the larger of what it sends and what it receives, each the sum over its moves of
    bytes / speed of the link, plus `latency_s` for each rank that it talks to. Nothing is assumed to overlap
    between steps or buckets.
    """
    if not plan.buckets:
        return 0.0
    world, links = plan.topology.world_size, plan.links()
    seconds = plan.nbytes * speeds.seconds_per_byte()[links]
    slot = plan.bucket.astype(np.int64) * STEPS + plan.step
    slots = plan.buckets * STEPS
    pair = (slot * world + plan.source) * world + plan.target
    _, first = np.unique(pair, return_index=True)  # moves of one step between two ranks are one message
    latency = np.zeros(len(pair))
    latency[first] = np.where(links[first] == LINKS.index("local"), 0.0, speeds.latency_s)
    busy = [
        np.bincount(slot * world + end, seconds + latency, slots * world).reshape(slots, world).max(axis=1)
        for end in (plan.source, plan.target)
    ]
    return float(np.maximum(*busy).sum())
