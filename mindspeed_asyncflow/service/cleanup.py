"""No process and no shared memory of a run survives the run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
_NAME = re.compile(r"asyncflow-(\d+)-")


def shm_path(kind: str) -> str:
    """Path of a shared-memory file of this run; the name says which driver process owns it."""
    return str(SHM / f"asyncflow-{os.getpid()}-{kind}")


def remove_stale_shm() -> list[str]:
    """Delete files that drivers left which were killed before they could; returns their names."""
    removed = []
    for file in SHM.glob("asyncflow-*"):
        owner = _NAME.match(file.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            file.unlink(missing_ok=True)
            removed.append(file.name)
    return removed


def remove_own_shm() -> None:
    for file in SHM.glob(f"asyncflow-{os.getpid()}-*"):
        file.unlink(missing_ok=True)


def descendants() -> list[psutil.Process]:
    """All processes below this one, now."""
    return psutil.Process().children(recursive=True)


def end_processes(processes: list[psutil.Process], grace_s: float = 3.0) -> list[str]:
    """Wait `grace_s` for the processes to end, then kill what is left; returns the names of the killed."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=grace_s)
    return [f"{p.pid}" for p in alive]
