"""No process and no shared memory of a run survives the run, however the driver ends.

Every process of a run inherits a mark in its environment, so that it is found wherever it was re-parented to. A small
reaper process holds a pipe to the driver: when the driver is gone without having cleaned up, it does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from mindspeed_asyncflow.service import reaper

SHM = Path("/dev/shm")
MARK = "ASYNCFLOW_RUN_MARK"
KILLED_S = 3.0  # a killed process is gone by then
_NAME = re.compile(r"asyncflow-(?:ray-)?(\d+)-")


def shm_path(kind: str) -> str:
    """Path of a shared-memory file of this run; the name says which driver process owns it."""
    return str(SHM / f"asyncflow-{os.getpid()}-{kind}")


def scratch_prefix() -> str:
    """Start of the name of this run's scratch folder; short, as Ray puts sockets in it."""
    return f"asyncflow-ray-{os.getpid()}-"


def remove_stale(folder: Path) -> list[str]:
    """Delete what drivers that are dead left in `folder`; returns the names. A file that a process has mapped is not
    left: its driver lives on another node."""
    dead = []
    for path in folder.glob("asyncflow-*"):
        owner = _NAME.match(path.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            dead.append(path)
    mapped = shared_files(list(psutil.process_iter())) if dead else set()
    removed = [path for path in dead if path not in mapped]
    for path in removed:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in removed]


def remove_own_shm() -> None:
    for file in SHM.glob(f"asyncflow-{os.getpid()}-*"):
        file.unlink(missing_ok=True)


def mark_environment() -> str:
    """Mark this process's environment, and with it that of every process started from now on."""
    value = f"{os.getpid()}-{time.time_ns()}"
    os.environ[MARK] = value
    return f"{MARK}={value}"


def start_reaper(mark: str, scratch: Path | None) -> subprocess.Popen:
    """Start the process that cleans up if this one dies; `scratch` is a folder to remove then."""
    return subprocess.Popen(
        [sys.executable, "-S", reaper.__file__, mark, str(os.getpid()), str(scratch or "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C at the terminal is for the driver
    )


def stop_reaper(process: subprocess.Popen, timeout_s: float = 5.0) -> None:
    """The driver has cleaned up."""
    process.communicate(b"clean", timeout=timeout_s)


def run_processes(mark: str, scratch: Path | None, spare: int = 0) -> list[psutil.Process]:
    """Processes of the run other than this one and `spare`, the reaper."""
    found = []
    for pid in reaper.processes_of(mark, str(scratch or "")):
        if pid != spare and psutil.pid_exists(pid):
            found.append(psutil.Process(pid))
    return found


def shared_files(processes: list[psutil.Process]) -> set[Path]:
    """Shared-memory files that the processes have mapped: libraries give them random names and leave some behind. What
    lies in folders there, such as a model, somebody has put there."""
    found = set()
    for process in processes:
        try:
            found |= {Path(m.path) for m in process.memory_maps() if os.path.dirname(m.path) == str(SHM)}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def end_processes(processes: list[psutil.Process], grace_s: float = 3.0) -> list[str]:
    """Wait `grace_s` for the processes to end, then kill what is left; returns "pid name" of the killed."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    killed = []
    for process in alive:
        try:
            killed.append(f"{process.pid} {process.name()}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=KILLED_S)
    return killed
