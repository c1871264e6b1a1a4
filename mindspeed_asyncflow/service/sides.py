"""The trainer's side and the rollout side of a run may live in two Python environments: what each process starts with.

side      processes                       settings
trainer   trainer and critic ranks,       placement.trainer_python, trainer_env, trainer_expandable_segments
          reference
rollout   replicas                        placement.rollout_python, rollout_env, rollout_expandable_segments
(none)    dock pairs, scorer              those of the run itself
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.platforms.allocator import allocator_environment
from mindspeed_asyncflow.platforms.ports import HCCL_PORT_VARIABLES, HcclPorts, plan_ports
from mindspeed_asyncflow.platforms.pythons import Environment, check_together, probe, pythons


class Sides:
    """Arguments of `spawn` for every kind of process.

    `npu`: ports are divided and the allocator is told. `present`: the run's own environment, which processes inherit.
    Raises `PlatformError` for a range of ports that is too small, and for allocator options that exclude each other.
    """

    def __init__(self, config: Config, npu: bool, present: Mapping[str, str]) -> None:
        self._settings, self._present = config.placement, present
        self._python = pythons(config)
        self.ports = plan_ports(config, config.cluster.device.devices_per_node) if npu else None
        for name in sorted({*HCCL_PORT_VARIABLES} & {*present}) if npu else ():
            get_logger("service").warning(
                "%s=%s of the shell is not used: placement.hccl_ports and hccl_port_range say which ports HCCL takes",
                name,
                present[name],
            )

    def trainer(self) -> dict[str, Any]:
        return self._trainer_side(self.ports.trainer if self.ports else None)

    def critic(self) -> dict[str, Any]:
        return self._trainer_side(self.ports.critic if self.ports else None)

    def reference(self) -> dict[str, Any]:
        """It has no device."""
        return self._side("trainer", {})

    def replica(self, index: int, sleeps: bool = False) -> dict[str, Any]:
        """`sleeps`: its device is a trainer's in turn, so its memory comes from a pool that cannot grow segments."""
        if self.ports is None:
            return self._side("rollout", {})
        chosen = self._settings.rollout_expandable_segments
        expandable = not sleeps if chosen is None else chosen
        made = self._npu("rollout", self.ports.replicas[index], expandable)
        if self.ports.engines:
            made["VLLM_PORT"] = str(self.ports.engines[index].start)  # it looks upwards from there
        return self._side("rollout", made)

    def relay(self) -> range:
        """Ports at which the relay of a node listens; just 0, for any one, where they are not divided."""
        return self.ports.relay if self.ports is not None and self.ports.relay is not None else range(1)

    def _trainer_side(self, ports: HcclPorts | None) -> dict[str, Any]:
        made = self._npu("trainer", ports, self._settings.trainer_expandable_segments) if ports else {}
        return self._side("trainer", made)

    def _npu(self, side: str, ports: HcclPorts, expandable: bool) -> dict[str, str]:
        present = {**self._present, **getattr(self._settings, f"{side}_env")}
        allocator = allocator_environment(present, expandable, f"placement.{side}_expandable_segments")
        return {**ports.environment(), **allocator}

    def _side(self, side: str, made: Mapping[str, str]) -> dict[str, Any]:
        environment = {**getattr(self._settings, f"{side}_env"), **made}
        return {"python": self._python.get(f"placement.{side}_python", ""), "environment": environment}


def check_environments(config: Config, timeout_s: float) -> dict[str, Environment]:
    """Every node has the Pythons that the settings name, and their processes can work with those of the run.

    Returns what they are on this node. Raises `PlatformError` that names setting, node and versions. Ray itself only
    warns of a process with another version, and starts one whose Python is missing again and again.
    """
    named = pythons(config)
    if not named:
        return {}
    own, here = probe(), ray.get_runtime_context().get_node_id()
    found: dict[str, Environment] = {}
    asked = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    tasks = {node: _ask.options(scheduling_strategy=_on(node)).remote(named) for node in asked}
    _, late = ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=timeout_s)
    for node, task in tasks.items():
        where = f" on node {asked[node]}" if len(asked) > 1 else ""
        if task in late:
            raise PlatformError(f"{', '.join(named)}{where} did not answer within {timeout_s:g} s")
        there, wrong = ray.get(task)
        for key, said in wrong.items():
            raise PlatformError(f"{key}{where}: {said}")
        check_together(own, there, where)
        if node == here or not found:
            found = there
    return found


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


@ray.remote(num_cpus=0, max_retries=0)
def _ask(named: Mapping[str, str]) -> tuple[dict[str, Environment], dict[str, str]]:
    """On the node itself: what each Python has, or why it does not work."""
    found, wrong = {}, {}
    for key, python in named.items():
        try:
            found[key] = probe(python)
        except PlatformError as error:
            wrong[key] = str(error)
    return found, wrong
