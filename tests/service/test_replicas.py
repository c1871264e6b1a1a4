"""Replicas that start, come later, fail or die, without Ray: who is waited for, who is told, what is cleaned up."""

import asyncio
import os
import subprocess
import sys
import time

import psutil
import pytest

from mindspeed_asyncflow.errors import DeadlineExceeded, EngineError, WorkerLost
from mindspeed_asyncflow.service import cleanup, replicas
from mindspeed_asyncflow.service.replicas import Replicas

HERE = ("here", "127.0.0.1")


class Process:
    """A remote process that is placed and built after some time, or fails, and dies when told to."""

    def __init__(self, index, place_s=0.0, build_s=0.0, error=None, pid=0):
        self.name, self.pid = f"rollout{index}", pid or 2**30
        self.place_s, self.build_s, self.error = place_s, build_s, error
        self.killed = False
        self.dying = asyncio.Event()

    async def where(self):
        await asyncio.sleep(self.place_s)
        return HERE

    async def build(self):
        await asyncio.sleep(self.build_s)
        if self.error is not None:
            raise self.error

    async def watch(self, heartbeat_s):
        await self.dying.wait()
        raise WorkerLost(f"{self.name} died")

    def kill(self):
        self.killed = True


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(replicas, "here", lambda: HERE)
    monkeypatch.setattr(replicas, "PLACED_S", 0.02)


async def started(processes, needed, limit_s=5.0):
    made = Replicas(
        processes.__getitem__, len(processes), needed, limit_s, lambda index: processes[index].build(), 30.0
    )
    await made.find()
    made.start()
    await made.enough()
    return made


def test_the_run_begins_with_those_that_are_needed_and_others_come_later():
    async def main():
        made = await started([Process(0, build_s=0.05), Process(1), Process(2, place_s=0.1)], 2)
        assert sorted(made.up) == [0, 1]
        await made.later(2)
        assert sorted(made.up) == [0, 1, 2] and len(made.places) == 3

    asyncio.run(main())


def test_all_are_needed_where_nothing_else_is_said_and_the_first_failure_ends_the_start():
    async def main():
        with pytest.raises(EngineError, match="no memory"):
            await started([Process(0, build_s=60), Process(1, error=EngineError("no memory"))], 2)

    asyncio.run(main())


def test_a_failure_does_not_matter_while_enough_are_there_and_its_process_is_ended():
    async def main():
        processes = [Process(0), Process(1, error=EngineError("no memory")), Process(2, build_s=60)]
        made = await started(processes, 1, limit_s=0.1)
        with pytest.raises(EngineError, match="no memory"):
            await made.later(1)
        with pytest.raises(DeadlineExceeded, match="rollout2 is not up"):
            await made.later(2)
        assert [p.killed for p in processes] == [False, True, True] and sorted(made.up) == [0]

    asyncio.run(main())


def test_a_deadline_names_who_is_missing():
    async def main():
        with pytest.raises(DeadlineExceeded, match=r"not placed after 0.05 s .*: rollout1, rollout2"):
            await started([Process(0), Process(1, place_s=60), Process(2, place_s=60)], 3, limit_s=0.05)
        with pytest.raises(DeadlineExceeded, match=r"not started after 0.05 s .*: rollout0$"):
            await started([Process(0, build_s=60), Process(1)], 2, limit_s=0.05)

    asyncio.run(main())


def test_a_death_is_told_once_and_after_the_end_nothing_is_a_loss():
    async def main():
        processes = [Process(0), Process(1)]
        made = await started(processes, 2)
        told = []
        made.lost = lambda index, error: told.append((index, str(error)))
        processes[1].dying.set()
        await asyncio.sleep(0.01)
        assert told == [(1, "rollout1 died")] and sorted(made.up) == [0] and sorted(made.places) == [0]
        made.close()
        processes[0].dying.set()
        await asyncio.sleep(0.01)
        assert len(told) == 1

    asyncio.run(main())


CHILD = """
import mmap, sys, time
file = open(sys.argv[1], "r+b")
view = mmap.mmap(file.fileno(), 0)
print(flush=True)
time.sleep(60)
"""


def test_what_a_dead_replica_leaves_is_removed_but_not_what_others_use(tmp_path, monkeypatch):
    """Its child processes, and shared memory that only they had mapped."""
    monkeypatch.setattr(cleanup, "SHM", tmp_path)
    own, shared = tmp_path / "own", tmp_path / "shared"
    for file in (own, shared):
        file.write_bytes(bytes(4096))

    def mapping(file):
        process = subprocess.Popen([sys.executable, "-S", "-c", CHILD, str(file)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        return process

    children, other = [mapping(own), mapping(shared)], mapping(shared)
    found = [psutil.Process(child.pid) for child in children]
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: found if self.pid == os.getpid() else [])
    monkeypatch.setattr(replicas, "GRACE_S", 0.1)

    async def main():
        processes = [Process(0, pid=os.getpid())]
        await started(processes, 1)
        processes[0].dying.set()
        deadline = time.monotonic() + 10
        while own.exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    try:
        asyncio.run(main())
        assert not any(process.is_running() for process in found)
        assert not own.exists() and shared.exists() and other.poll() is None
    finally:
        for process in (*children, other):
            process.kill()
            process.wait()
