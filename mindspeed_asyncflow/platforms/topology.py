"""Which hosts a run has and how they hang together: HCCS inside a superpod, RoCE between superpods.

A host file names one host per line, in the order in which processes fill them:

    node0 slots=16 superpod=a      # slots: devices to use; superpod: hosts with the same word share HCCS
    node1 slots=16 superpod=a address=10.0.0.5   # address: where the other hosts reach it

Everything behind the name is optional. Pure functions, but for those that ask this machine.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.errors import ConfigError, PlatformError

SUPERPOD_ENV = "HCCL_LOGIC_SUPERPOD_ID"  # HCCL's own name of the superpod of a host, where one is cut into several
TOPOLOGY_ENV = "ASYNCFLOW_TOPOLOGY"  # a host file that describes a running Ray cluster
SUPERPOD_RESOURCE = "superpod:"  # start of a Ray resource that says the same where there is no file
NPU_SMI_S = 20.0  # npu-smi answers within a second on a healthy machine

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class Host:
    """A line of a host file. None: what the host says of itself."""

    name: str
    slots: int | None = None
    superpod: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a Ray cluster."""

    id: str
    ip: str
    devices: int
    superpod: str = ""


def read_hosts(path: str | Path) -> list[Host]:
    """The hosts of a file. Raises `ConfigError` with all its mistakes and their lines."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"host file {path} cannot be read: {error}") from None
    return parse_hosts(text, str(path))


def declared_hosts(environment: Mapping[str, str]) -> list[Host] | None:
    """The hosts of the running cluster, where a variable names their file; else None."""
    return read_hosts(environment[TOPOLOGY_ENV]) if environment.get(TOPOLOGY_ENV) else None


def parse_hosts(text: str, name: str = "host file") -> list[Host]:
    """As `read_hosts`, for its text; `name` opens the error message."""
    hosts: list[Host] = []
    mistakes: list[str] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
            if host.name in lines:
                raise ValueError(f"{host.name} stands in line {lines[host.name]} already")
        except ValueError as error:
            mistakes.append(f"line {number}: {error}")
            continue
        lines[host.name] = number
        hosts.append(host)
    if not hosts and not mistakes:
        mistakes.append("no host in it")
    if mistakes:
        raise ConfigError("\n  ".join([f"{name}: expected `host [slots=N] [superpod=NAME] [address=IP]`", *mistakes]))
    return hosts


def _host(words: Sequence[str]) -> Host:
    """Raises `ValueError` with what is wrong."""
    name, *rest = words
    if not _HOST.fullmatch(name):
        raise ValueError(f"{name!r} is no host name")
    given: dict[str, str] = {}
    for word in rest:
        key, equals, value = word.partition("=")
        if key not in ("slots", "superpod", "address") or not equals:
            raise ValueError(f"{word!r} is none of slots=N, superpod=NAME, address=IP")
        if key in given:
            raise ValueError(f"{key} is given twice")
        given[key] = value
    if "slots" in given and not (given["slots"].isdecimal() and int(given["slots"]) > 0):
        raise ValueError(f"slots={given['slots']}: a number of devices from 1 on is expected")
    if "superpod" in given and not _WORD.fullmatch(given["superpod"]):
        raise ValueError(f"superpod={given['superpod']}: a word of letters and digits is expected")
    if "address" in given and not _HOST.fullmatch(given["address"]):
        raise ValueError(f"address={given['address']}: an IP address is expected")
    slots = int(given["slots"]) if "slots" in given else None
    return Host(name, slots, given.get("superpod"), given.get("address"))


def format_hosts(hosts: Sequence[Host]) -> str:
    """The text of a host file; `parse_hosts` reads it back."""
    lines = []
    for host in hosts:
        words = [host.name]
        for key in ("slots", "superpod", "address"):
            value = getattr(host, key)
            if value not in (None, ""):
                words.append(f"{key}={value}")
        lines.append(" ".join(words) + "\n")
    return "".join(lines)


def own_superpod(environment: Mapping[str, str]) -> str:
    """The superpod of this machine, from HCCL's variable, else from npu-smi; "" where neither knows one."""
    if named := environment.get(SUPERPOD_ENV):
        return named
    try:
        command = ["npu-smi", "info", "-t", "spod-info", "-i", "0", "-c", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=NPU_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return superpod_in(done.stdout) if done.returncode == 0 else ""


def superpod_in(spod_info: str) -> str:
    """The superpod's number in what `npu-smi info -t spod-info` prints; "" where it stands nowhere."""
    found = re.search(r"^\s*Super Pod ID\s*:\s*(\d+)\s*$", spod_info, re.MULTILINE)
    return found[1] if found else ""


def cluster_nodes(ray_nodes: Sequence[Mapping[str, Any]], resource: str, hosts: Sequence[Host] | None) -> list[Node]:
    """Living nodes in the order in which processes fill them: that of `hosts`, else by superpod and address.

    `ray_nodes`: what Ray lists; `resource`: its name of a device; `hosts`: a topology that names each node by its
    address or name. Raises `PlatformError` for a node that it does not have.
    """
    nodes: list[tuple[Any, Node]] = []
    places = {word: (i, h) for i, h in enumerate(hosts or ()) for word in (h.name, h.address) if word}
    for ray in ray_nodes:
        if not ray["Alive"]:
            continue
        ip, resources = ray["NodeManagerAddress"], ray["Resources"]
        devices, superpod = int(resources.get(resource, 0)), _superpod_among(resources)
        key: Any = (superpod, _number(ip))
        if hosts is not None:
            at = places.get(ip) or places.get(ray.get("NodeManagerHostname", ""))
            if at is None:
                raise PlatformError(f"node {ip} of the Ray cluster is not in the topology: {', '.join(places)}")
            key, superpod = at[0], at[1].superpod or superpod
        nodes.append((key, Node(ray["NodeID"], ip, devices, superpod)))
    return [node for _, node in sorted(nodes, key=lambda pair: pair[0])]


def _superpod_among(resources: Mapping[str, Any]) -> str:
    return next((r.removeprefix(SUPERPOD_RESOURCE) for r in sorted(resources) if r.startswith(SUPERPOD_RESOURCE)), "")


def _number(ip: str) -> tuple[Any, ...]:
    """10.0.0.9 comes before 10.0.0.10."""
    return tuple(int(part) if part.isdecimal() else -1 for part in re.split(r"[.:]", ip))
