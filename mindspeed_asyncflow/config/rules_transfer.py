"""What does not go together with vllm-ascend's own transfer of weights (`rollout.ascend.transfer`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mindspeed_asyncflow.config.feasibility import sharing_replicas
from mindspeed_asyncflow.config.schema import Config

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]
KEY = "rollout.ascend.transfer"


def rules(c: Config) -> Iterator[Raw]:
    if c.rollout.native is None:
        return
    w, a = c.workflow, c.rollout.ascend
    native = a.transfer
    if sharing_replicas(c):
        yield (
            "error",
            (KEY, "workflow.lend" if w.lend else "workflow.schedule"),
            f"{native} joins devices of a trainer and of replicas into one group, and these replicas are on the "
            "trainer's devices: set it to relay, or take schedule separated without lend",
        )
    if w.relay == "mirror":
        yield "error", (KEY, "workflow.relay"), f"mirrors belong to the relay, not to {native}: leave relay at auto"
    if w.relay_delta:
        yield "warning", ("workflow.relay_delta", KEY), f"has no use: {native} sends whole versions; leave it out"
    if c.run.platform == "cpu":
        return
    if a.graphs:
        yield (
            "error",
            (KEY, "rollout.ascend.graphs"),
            f"graphs fail at the first replay after a transfer by {native}: set graphs to false, or transfer to relay",
        )
    if c.placement.hccl_ports == "base_port":
        yield (
            "error",
            (KEY, "placement.hccl_ports"),
            "a sender and a trainer rank are two processes on one device, and with base_port both would listen on "
            "HCCL's default port there: take ranges",
        )
    if c.trainer.world_size > c.cluster.device.devices_per_node:
        yield (
            "error",
            (KEY, "cluster.devices_per_node"),
            f"a sender reads the relay of one node, and {c.trainer.world_size} trainer ranks are more than the "
            f"{c.cluster.device.devices_per_node} devices of one: set it to relay",
        )
