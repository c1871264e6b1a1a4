"""Ports: held from choosing to using, and divided among the processes of a run on NPU nodes before anybody uses them.

HCCL listens on its host, at HCCL_IF_BASE_PORT plus the number of the device or, where HCCL_HOST_SOCKET_PORT_RANGE is
set, at a free port of that range; and on its device, at 16666 or at a free port of HCCL_NPU_SOCKET_PORT_RANGE. All
processes of a host share its ports, those that use a device share the ports of the device.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_asyncflow.config.feasibility import in_place, own_replicas, sharing_replicas
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import PlatformError


class HeldPort:
    """A port that this process keeps bound and listening until it hands the socket over or closes it.

    Choosing a free port, closing it and binding it later is a race that several engines on one node lose; holding the
    listening socket is not. A server that accepts a listening file descriptor takes `detach()`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.host, self.port = sock.getsockname()[:2]

    def detach(self) -> int:
        """The listening file descriptor; the caller owns it from now on."""
        return self._socket.detach()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def hold_port(port: int = 0, *, host: str = "127.0.0.1", attempts: int = 1, knob: str = "port") -> HeldPort:
    """Bind and hold a TCP port.

    `port=0` takes any free one from the system. A fixed `port` is tried first, then the `attempts - 1` following
    numbers. Raises `PlatformError` naming `knob` when all of them are busy.
    """
    last: OSError | None = None
    for offset in range(max(1, attempts)):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server's last connections may linger
            sock.bind((host, port + offset if port else 0))
            sock.listen(256)
            return HeldPort(sock)
        except OSError as error:
            sock.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                raise
            last = error
    tried = f"{port}" if attempts <= 1 else f"{port}..{port + attempts - 1}"
    raise PlatformError(
        f"port {tried} on {host} cannot be bound ({last}): set {knob} to a free port, or to 0 for any free one"
    )


HCCL_PORT_VARIABLES = ("HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
HCCL_BASE_PORTS = 16  # HCCL_IF_BASE_PORT and the ports after it: one for each device of a node
_DEVICE_PORTS = 16  # of one process on one device
_ENGINE_PORTS = 16  # where one replica's own processes meet; it takes the first that are free
_RELAY_PORTS = 8  # one server listens on a node; spare ones for ports that are taken


@dataclass(frozen=True, slots=True)
class HcclPorts:
    """Ports of one group of processes on any node. None where HCCL shall find them by itself."""

    host: range | None  # the first 16 also are those from HCCL_IF_BASE_PORT
    device: range | None  # on every device that the group uses

    def environment(self) -> dict[str, str]:
        """What a process of the group must have in its environment before it loads torch_npu."""
        base, *ranges = HCCL_PORT_VARIABLES
        if self.host is None:
            return dict.fromkeys(ranges, "auto")
        named = {base: str(self.host.start)}
        if self.device is not None:
            named |= zip(ranges, (_written(self.host), _written(self.device)))
        return named


@dataclass(frozen=True, slots=True)
class PortPlan:
    """Which ports the processes of a run use on an NPU node. No two groups share one, whatever node they are on."""

    trainer: HcclPorts  # trainer ranks, with replicas that live in their processes
    critic: HcclPorts  # none without a critic
    replicas: tuple[HcclPorts, ...]  # by index, with who sends to it; the last ones are those on trainers' devices
    engines: tuple[range, ...]  # TCP ports of the replicas' own processes, by index; none where HCCL chooses too
    relay: range | None  # TCP ports where weights are served to other nodes; None: any free one

    def groups(self) -> dict[str, range]:
        """All ranges by what they are for, ascending."""
        named = {"trainer": self.trainer, "critic": self.critic}
        named |= {f"rollout{index}": ports for index, ports in enumerate(self.replicas)}
        found = {"relay": self.relay} if self.relay is not None else {}
        found |= {f"rollout{index} engine": ports for index, ports in enumerate(self.engines)}
        for name, ports in named.items():
            for side, wanted in (("host", ports.host), ("device", ports.device)):
                if wanted is not None:
                    found[f"{name} {side}"] = wanted
        return dict(sorted(found.items(), key=lambda item: item[1].start))


def plan_ports(config: Config, devices_per_node: int = HCCL_BASE_PORTS) -> PortPlan:
    """Divide `placement.hccl_port_range` among trainer, critic, every replica and the relay.

    A group's ports are the same on all of its nodes, as HCCL asks of one communicator. Every process listens on one
    port of its host and one of its device at a time; a group on one node has two of each for it, and never fewer than
    the 16 that HCCL takes from its base port. Raises `PlatformError` for a range that cannot hold them.
    """
    how, (first, last) = config.placement.hccl_ports, config.placement.hccl_port_range
    apart = 0 if in_place(config) else sharing_replicas(config)
    count, size = own_replicas(config) + apart, config.rollout.tensor_parallel
    size += 1 if config.rollout.native else 0  # who sends weights to a replica belongs to its group
    if how == "auto":
        free = HcclPorts(None, None)
        return PortPlan(free, free, (free,) * count, (), None)
    if how == "base_port" and apart:
        raise PlatformError(
            f"placement.hccl_ports=base_port with {apart} replicas on the devices of trainer ranks: two processes of "
            "one device would listen on HCCL's default port there; take ranges, or separated without workflow.lend"
        )
    _check_range(first, last, config)
    at = first

    def cut(ports: int) -> range:
        nonlocal at
        at += ports
        return range(at - ports, at)

    def group(processes: int) -> HcclPorts:
        if not processes:
            return HcclPorts(None, None)
        host = cut(max(HCCL_BASE_PORTS, devices_per_node, 2 * min(processes, devices_per_node)))
        return HcclPorts(host, cut(_DEVICE_PORTS) if how == "ranges" else None)

    relay = cut(_RELAY_PORTS)
    trainer, critic, *replicas = (group(n) for n in (config.trainer.world_size, config.critic_size, *[size] * count))
    engines = tuple(cut(_ENGINE_PORTS) for _ in replicas)
    if at - 1 > last:
        raise PlatformError(
            f"placement.hccl_port_range=[{first}, {last}] has {last - first + 1} ports, {at - first} are needed for "
            f"trainer, critic, {count} replicas and the relay: widen it, or set placement.hccl_ports=auto"
        )
    return PortPlan(trainer, critic, tuple(replicas), engines, relay)


def _check_range(first: int, last: int, config: Config) -> None:
    said = f"placement.hccl_port_range=[{first}, {last}]"
    if not 1024 <= first <= last <= 65535:
        raise PlatformError(f"{said}: two ports are expected, the smaller one first, between 1024 and 65535")
    dock = range(config.dock.port, config.dock.port + config.dock.pairs) if config.dock.port else range(0)
    if taken := overlap(dock, range(first, last + 1)):
        raise PlatformError(f"{said} contains {_written(taken)}, which the dock listens on: move it or dock.port")


def overlap(one: range, other: range) -> range:
    """Ports in both; empty where there is none."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _written(ports: range) -> str:
    return f"{ports.start}-{ports.stop - 1}"


HCCL_DEFAULTS = (range(60000, 60016), range(16666, 16667))  # of a job that sets nothing: on the host, on a device


def kernel_ports(settings: Path = Path("/proc/sys/net/ipv4")) -> tuple[range, tuple[range, ...]]:
    """(ports that the kernel gives to outgoing connections, ports that it never gives)."""
    first, last = map(int, (settings / "ip_local_port_range").read_text().split())
    reserved = (settings / "ip_local_reserved_ports").read_text().strip()
    kept = [part.partition("-")[::2] for part in reserved.split(",") if part]
    return range(first, last + 1), tuple(range(int(a), int(b or a) + 1) for a, b in kept)


def port_warnings(plan: PortPlan, handed_out: range, reserved: Sequence[range] = ()) -> list[str]:
    """What may take ports of the plan from it. `handed_out`: ports that the kernel gives to connections; `reserved`:
    those among them that it leaves alone."""
    found = []
    for name, ports in plan.groups().items():
        exposed = overlap(ports, handed_out)
        if exposed and not any(exposed.start >= kept.start and exposed.stop <= kept.stop for kept in reserved):
            found.append(
                f"{name} ports {_written(ports)} lie in the range that the kernel gives to connections "
                f"({_written(handed_out)}): move placement.hccl_port_range, or reserve them with "
                f"sysctl net.ipv4.ip_local_reserved_ports"
            )
        if any(overlap(ports, default) for default in HCCL_DEFAULTS):
            found.append(f"{name} ports {_written(ports)} contain HCCL's defaults, which jobs without a port plan use")
    return found
