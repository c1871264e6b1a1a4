"""What this machine offers, or an assumed cluster would; the standard library reads it, no device library is loaded."""

from __future__ import annotations

import glob
import importlib.util
import math
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from mindspeed_asyncflow.config.cluster import ClusterConfig

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run may use: this node, or an assumed cluster. Ports and modules are asked when needed."""

    cpus: int
    npus: int
    memory_bytes: int  # in all, over the nodes
    free_memory_bytes: int
    shm_bytes: int  # free in shared memory
    disk_bytes: int  # free where runs are written
    nodes: int = 1
    assumed: bool = False  # not here: ports count as free, modules as installed, files as being there
    whole: bool = True  # False: this node only, of a cluster whose size is not known here
    bfloat16: bool = True  # its CPUs multiply matrices of it about as fast as of float32

    def port_is_free(self, port: int) -> bool:
        """True where a server can listen on `port` now, on every address."""
        if self.assumed:
            return True
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                return False
        return True

    def has_module(self, name: str) -> bool:
        """True where `import name` would find something; nothing is imported."""
        return self.assumed or name in sys.modules or importlib.util.find_spec(name) is not None


def probe(folder: str | Path = ".") -> Machine:
    """This machine; `folder` is where runs will be written (its nearest existing parent is measured)."""
    total, free = _memory()
    place = Path(folder).absolute()
    while not os.path.exists(place):  # Path.exists raises for a name that is too long
        place = place.parent
    shm = Path("/dev/shm")
    return Machine(
        cpus=_cpus(),
        npus=len(glob.glob("/dev/davinci[0-9]*")),
        memory_bytes=total,
        free_memory_bytes=free,
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        disk_bytes=shutil.disk_usage(place).free,
        bfloat16=_multiplies_bfloat16(_read("/proc/cpuinfo")),
    )


def assume(devices: int, cluster: ClusterConfig, here: Machine) -> Machine:
    """A cluster of `devices` NPUs in nodes as `cluster` describes them, each with the CPUs and disk of `here`.

    Shared memory is half of the host memory, as Linux sizes it.
    """
    device = cluster.device
    nodes = math.ceil(devices / device.devices_per_node)
    memory = int(nodes * device.host_memory_gb * 1e9)
    return Machine(
        cpus=nodes * here.cpus,
        npus=devices,
        memory_bytes=memory,
        free_memory_bytes=memory,
        shm_bytes=memory // 2,
        disk_bytes=here.disk_bytes,
        nodes=nodes,
        assumed=True,
    )


# File systems of one node, as /proc/mounts names them; on others (nfs, lustre, ...) all nodes may see the same files.
LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs"))


def file_system(path: str | Path, mounts: str | None = None) -> str:
    """Type of the file system that holds `path`, or would; "" where it is not known. `mounts`: text of /proc/mounts."""
    place = os.path.realpath(path)
    rows = [line.split() for line in (_read("/proc/self/mounts") if mounts is None else mounts).splitlines()]
    holding = [(row[1], row[2]) for row in rows if len(row) > 2 and f"{place}/".startswith(f"{row[1].rstrip('/')}/")]
    return max(enumerate(holding), key=lambda item: (len(item[1][0]), item[0]), default=(0, ("", "")))[1][1]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def _multiplies_bfloat16(cpuinfo: str) -> bool:
    """By oneDNN, which torch multiplies with; without that torch is tens of times slower. True where it is unknown."""
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip() == "flags":  # x86
            flags = set(words.split())
            return {"avx512bw", "avx512vl", "avx512dq"} <= flags or "avx_ne_convert" in flags
        if name.strip() == "Features":  # Arm
            return "bf16" in words.split()
    return True


def _cpus() -> int:
    """Cores that this process may use: affinity, and the quota of its container."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cpus = min(cpus, max(1, round(int(quota) / int(period))))
    return cpus


def _memory() -> tuple[int, int]:
    """Total and available bytes, the container's limit included."""
    rows = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    total, free = (int(rows.get(key, "0 kB").split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        used = _read("/sys/fs/cgroup/memory.current").strip()
        total = min(total, int(limit))
        free = min(free, int(limit) - int(used or 0))
    return total, free
