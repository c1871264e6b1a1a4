"""The Ascend software and devices of this node, and the HCCL ports of a run: what can be seen before a launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from mindspeed_asyncflow.cli import environments
from mindspeed_asyncflow.config import Config, feasibility
from mindspeed_asyncflow.config.checks import Finding
from mindspeed_asyncflow.config.machine import Machine
from mindspeed_asyncflow.config.rules_placement import OF_VLLM
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms import cann, matrix, npu_smi, ports
from mindspeed_asyncflow.platforms.allocator import allocator_environment
from mindspeed_asyncflow.platforms.connectivity import hccl_groups
from mindspeed_asyncflow.platforms.devices import VISIBLE_ENV as VISIBLE
from mindspeed_asyncflow.platforms.devices import visible_ids
from mindspeed_asyncflow.platforms.pythons import pythons

SIDES = ("trainer", "rollout")
Answer = TypeVar("Answer")
MOST_SHOWN = 12  # port ranges
OFF = ("VLLM_ASCEND_ENABLE_NZ", "VLLM_ASCEND_ENABLE_FUSED_MC2", "VLLM_USE_V2_MODEL_RUNNER")  # replicas refuse them on
RL_CONFIG_SINCE = (0, 27)  # releases of vllm-ascend that know this option


@dataclass(frozen=True, slots=True)
class Node:
    """What was seen on a node; tests and callers that have no node put their own in."""

    cann: str  # "": none in this environment
    cann_installed: str  # in its usual place, whether in this environment or not
    driver: str
    devices: npu_smi.Report | PlatformError
    environments: environments.Seen
    visible: str | None = None  # the variable that limits the devices
    kernel_ports: tuple[range, tuple[range, ...]] = field(default=(range(0), ()))


def look(config: Config) -> Node:
    """This node. The tool and the Pythons are asked at the same time; those that hang end this after 6 s."""
    with ThreadPoolExecutor() as pool:
        report = pool.submit(_or_error, npu_smi.read)
        seen = environments.look(config)
        devices = report.result()
    tool = devices.version if isinstance(devices, npu_smi.Report) else ""
    return Node(
        cann.cann_version(os.environ),
        cann.installed_cann(),
        cann.driver_version() or tool,
        devices,
        seen,
        os.environ.get(VISIBLE),
        ports.kernel_ports(),
    )


def _or_error(ask: Callable[..., Answer], *arguments: object) -> Answer | PlatformError:
    try:
        return ask(*arguments)
    except PlatformError as error:
        return error


def findings(config: Config, machine: Machine, node: Node | None) -> Iterator[Finding]:
    """`node` None: it is not here, and only the ports are planned."""
    if node is not None:
        yield from _software(config, node)
        yield from _devices(node)
    yield from _ports(config, machine, node)


def _software(config: Config, node: Node) -> Iterator[Finding]:
    for level, text in matrix.check_cann(node.cann):
        there = f"; CANN {node.cann_installed} is installed here" if not node.cann and node.cann_installed else ""
        yield Finding(level, ("run.platform",), text + there)
    graphs = config.rollout.ascend.graphs
    for level, text in matrix.check_driver(node.driver, eager=not graphs):
        yield Finding(level, ("rollout.ascend.graphs" if graphs else "run.platform",), text)
    yield from environments.findings(config, node.environments)
    for side, check in (("trainer", matrix.check_trainer), ("rollout", matrix.check_rollout)):
        key = (f"placement.{side}_python",)
        environment = node.environments[side]
        if side == "rollout" and config.rollout.engine != "vllm":
            continue
        if isinstance(environment, PlatformError):
            if key[0] not in pythons(config):  # those are said above
                yield Finding("error", key, str(environment))
            continue
        found = environment.versions | {"python": environment.python}
        for level, text in check(found, node.cann):
            yield Finding(level, key, f"{side}: {text}")
        version = found.get("vllm-ascend", "") if side == "rollout" else ""
        asked = version and "rl_config" in config.rollout.ascend.additional
        if asked and matrix.numbers(version)[:2] < RL_CONFIG_SINCE:
            text = f"rl_config is unknown to vllm-ascend {version}; it takes {'.'.join(map(str, RL_CONFIG_SINCE))}"
            yield Finding("error", ("rollout.ascend.additional", *key), f"{text} or newer")


def _devices(node: Node) -> Iterator[Finding]:
    key = ("run.platform",)
    if isinstance(node.devices, PlatformError):
        yield Finding("error", key, str(node.devices))
        return
    try:
        visible = visible_ids(node.visible)
    except PlatformError as error:
        yield Finding("error", key, f"{VISIBLE}: {error}")
        return
    for level, text in npu_smi.check(node.devices, visible):
        yield Finding(level, key, text)


def variable_findings(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that processes would refuse at their start. `environ`: what they inherit from the run."""
    p = config.placement
    chosen = p.rollout_expandable_segments
    grows = {"trainer": p.trainer_expandable_segments}
    if not feasibility.in_place(config):  # else replicas live in the trainers' processes
        grows["rollout"] = feasibility.own_replicas(config) > 0 if chosen is None else chosen  # sleeping ones do not
    for side, expandable in grows.items():
        keys = (f"placement.{side}_expandable_segments", f"placement.{side}_env")
        try:
            allocator_environment({**environ, **getattr(p, f"{side}_env")}, expandable, keys[0])
        except PlatformError as error:
            yield Finding("error", keys, str(error))
    if config.rollout.engine == "vllm":
        for name in OFF:
            if environ.get(name, "") not in ("", "0"):
                text = f"{name}={environ[name]} in the environment of the run must be 0 or left out: {OF_VLLM[name]}"
                yield Finding("error", ("run.platform",), text)


def _ports(config: Config, machine: Machine, node: Node | None) -> Iterator[Finding]:
    key = ("placement.hccl_port_range",)
    try:
        plan = ports.plan_ports(config, config.cluster.device.devices_per_node)
    except PlatformError as error:
        yield Finding("error", ("placement.hccl_port_range", "placement.hccl_ports"), str(error))
        return
    if node is None:
        return
    for text in ports.port_warnings(plan, *node.kernel_ports):
        yield Finding("warning", key, text)
    for name, wanted in plan.groups().items():
        if name.endswith(" device"):  # listened on by the device itself: nothing here tells whether they are free
            continue
        taken = [port for port in wanted if not machine.port_is_free(port)]
        if taken:
            level, what = (
                ("error", "all") if len(taken) == len(wanted) else ("warning", f"{len(taken)} of {len(wanted)}")
            )
            yield Finding(
                level,  # type: ignore[arg-type]
                key,
                f"{what} ports for {name} are taken here, first {taken[0]}: another job uses them, or processes of an "
                "earlier one are left; stop those, or give this run a range of its own",
            )


def lines(config: Config, node: Node | None) -> Iterator[str]:
    """What was seen, the groups of devices that talk to each other, and the ports."""
    if node is None:
        yield "software and devices: assumed to be right, nothing was looked at"
    else:
        yield f"CANN {node.cann or 'none in this environment'}, driver {node.driver or 'unknown'}"
        for side in SIDES:
            yield f"{side}: {node.environments[side]}"
        if isinstance(node.devices, npu_smi.Report):
            yield from _chips(node.devices)
    per_node = config.cluster.device.devices_per_node
    connected = [f"HCCL {group}" for group in hccl_groups(config, per_node)]
    yield from connected or ["HCCL groups: none, every rank is alone"]
    try:
        groups = ports.plan_ports(config, per_node).groups()
    except PlatformError:  # a finding says why
        return
    shown = {name: f"{wanted.start}-{wanted.stop - 1}" for name, wanted in groups.items()}
    if not shown:
        yield "HCCL ports: any free ones"
    for name in list(shown)[:MOST_SHOWN]:
        yield f"{name} ports: {shown[name]}"
    if len(shown) > MOST_SHOWN:
        yield f"and {len(shown) - MOST_SHOWN} more ranges up to {max(wanted.stop for wanted in groups.values()) - 1}"


def _chips(report: npu_smi.Report) -> Iterator[str]:
    """Devices that look alike in one line."""
    alike: dict[tuple[str, str, int], list[int]] = {}
    for chip in report.chips:
        alike.setdefault((chip.name, chip.health, chip.memory_mib), []).append(chip.id)
    for (name, health, memory), ids in alike.items():
        yield f"{len(ids)} x {name} of {memory} MiB, health {health}: devices {', '.join(map(str, ids))}"
