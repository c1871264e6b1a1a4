"""Clocks, memory and traffic of any process, read from the kernel. Standard library only: loaded on both sides."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterable, Sequence

now = time.perf_counter  # CLOCK_MONOTONIC on Linux: comparable between processes

_TCP_INFO_BYTES = 160
_TCP_BYTES_AT, _TCP_SEGMENTS_AT = 120, 152  # (acknowledged, received) as u64; data segments (in, out) as u32


def percentile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50_ms": percentile(seconds, 0.5) * 1e3,
        "p99_ms": percentile(seconds, 0.99) * 1e3,
        "rows": len(seconds),
    }


def cpu_s(pids: Iterable[int]) -> float:
    """User and system seconds that these processes have used, all threads, in nanosecond steps."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # the kernel's number of a process's CPU clock


def memory(pid: int) -> dict[str, int]:
    """Bytes: `private` is resident without shared memory, `peak` the largest resident size, `shared` the rest."""
    fields = {}
    with open(f"/proc/{pid}/status", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name in ("VmHWM", "RssAnon", "RssFile", "RssShmem"):
                fields[name] = int(value.split()[0]) * 1024
    return {
        "private": fields["RssAnon"] + fields["RssFile"],
        "shared": fields["RssShmem"],
        "peak": fields["VmHWM"],
    }


def reset_peak(pid: int) -> None:
    with open(f"/proc/{pid}/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")


def own_traffic() -> dict[str, int]:
    """Payload bytes and data segments, both directions, of all TCP connections that this process has open."""
    total = {"bytes": 0, "messages": 0}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself, listening sockets
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                connection.getpeername()
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            total["bytes"] += sum(struct.unpack_from("<QQ", info, _TCP_BYTES_AT))
            total["messages"] += sum(struct.unpack_from("<II", info, _TCP_SEGMENTS_AT))
    return total
