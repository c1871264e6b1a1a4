"""Ends what a dead driver left. A script of its own, standard library only: MARK DRIVER_PID SCRATCH_FOLDER.

Waits for the end of its standard input. The word "clean" before it means that the driver has cleaned up itself.
"""

import contextlib
import glob
import os
import shutil
import signal
import sys
import time

GRACE_S = 2.0  # workers that notice the death by themselves end in order
ROUNDS = 20


def processes_of(mark: str, scratch: str) -> list[int]:
    """Other processes that carry `mark` in their environment or have a file open below the folder `scratch`.

    The second is needed because a process that sets its title, as Ray's do, overwrites what is seen of its
    environment; its output still goes to a log file in the scratch folder.
    """
    return [int(e) for e in os.listdir("/proc") if e.isdigit() and int(e) != os.getpid() and _belongs(e, mark, scratch)]


def _belongs(pid: str, mark: str, scratch: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if mark.encode() in file.read().split(b"\0"):
                return True
        files = os.listdir(f"/proc/{pid}/fd") if scratch else []
    except OSError:  # gone, or not ours
        return False
    for number in files:
        try:
            if os.readlink(f"/proc/{pid}/fd/{number}").startswith(scratch):
                return True
        except OSError:  # closed meanwhile
            continue
    return False


def shared_files(pid: int) -> set[str]:
    """Files of a run in shared memory, also on behalf of a driver elsewhere, that the process has mapped or open."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            found = {"/dev/shm/" + line.rstrip("\n").partition("/dev/shm/")[2] for line in file if "/dev/shm/" in line}
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # gone
        return set()
    for number in numbers:
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {path for path in found if path.startswith("/dev/shm/asyncflow-") and not path.endswith(" (deleted)")}


def main() -> None:
    mark, driver, scratch = sys.argv[1:4]
    if sys.stdin.buffer.read() == b"clean":
        return
    shared = {file for pid in processes_of(mark, scratch) for file in shared_files(pid)}
    time.sleep(GRACE_S)
    for _ in range(ROUNDS):  # a process may start another one while we look
        left = processes_of(mark, scratch)
        if not left:
            break
        for pid in left:
            shared |= shared_files(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    for path in {*glob.glob(f"/dev/shm/asyncflow-{driver}-*"), *shared}:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
