"""What one host of a launch is and has. Loads no Ray and no torch."""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import ipaddress
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.topology import own_superpod
from mindspeed_asyncflow.service.inherited import ROOT

# Equal on all hosts: processes of one kind talk to each other, and pickled calls travel between them.
EQUAL_PACKAGES = ("ray", "torch", "torch-npu", "megatron-core", "mindspeed", "vllm", "vllm-ascend", "numpy", "pydantic")
PROBE_PORT = 9  # nothing is sent: the kernel only says which of its addresses would reach a peer


def facts() -> dict[str, Any]:
    """What the launcher compares between hosts (`equal`), and what it needs to know of each."""
    versions: dict[str, str] = {"Python": platform.python_version()}
    for name in EQUAL_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    versions["source of mindspeed_asyncflow"] = fingerprint(ROOT / "mindspeed_asyncflow")
    return {
        "equal": versions,
        "npus": len(glob.glob("/dev/davinci[0-9]*")),
        "superpod": own_superpod(os.environ),
        "cpus": len(os.sched_getaffinity(0)),
    }


def fingerprint(folder: Path) -> str:
    """Twelve hexadecimal digits of all Python files below `folder`."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def own_address(given: str, peers: Sequence[str]) -> str:
    """The address at which `peers` reach this host: `given` if it is one of this host and they could use it.

    A name often stands for a loopback address on the host itself, or is known to the launcher command only; then the
    one that a peer is reached from is taken, else the only one that there is. Raises `PlatformError` where that says
    nothing.
    """
    abroad = [peer for peer in peers if not _loopback(peer)]
    if given and (not _loopback(given) or not abroad):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((given, 0))
                return given
            except OSError:
                raise PlatformError(
                    f"{given} is no address of this host: put address=IP behind its name in the host file"
                ) from None
    for peer in abroad:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((peer, PROBE_PORT))
                return str(probe.getsockname()[0])
            except OSError:
                continue
    found = _outward()
    if len(found) == 1:
        return found[0]
    which = f"which of {', '.join(found)} others reach this host at is not known" if found else "it has no address"
    raise PlatformError(f"{which}: put address=IP behind its name in the host file")


def _outward() -> list[str]:
    """IPv4 addresses of this host's interfaces that are up, loopback apart."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    listed = [
        (name, a.address) for name, many in psutil.net_if_addrs().items() for a in many if a.family == socket.AF_INET
    ]
    return [address for name, address in listed if name in up and not _loopback(address)]


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def without_proxy(addresses: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which no connection between hosts takes a proxy for the way out: Ray's would."""
    known = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    listed = ",".join(dict.fromkeys([*filter(None, known.split(",")), *addresses]))
    return {"no_proxy": listed, "NO_PROXY": listed}


def check_shared(file: Path, token: str) -> None:
    """Raise `PlatformError` unless this host reads `token` in `file`, as the launcher has written it."""
    try:
        if file.read_text(encoding="utf-8") == token:
            return
        why = "it holds something else"
    except OSError as error:
        why = error.strerror or str(error)
    raise PlatformError(
        f"the run folder is not on storage that all hosts share: {file} cannot be read here ({why}); set run.folder or "
        "--run-folder"
    )
