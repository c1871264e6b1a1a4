"""The rollout replicas of a run: those that it needs to start, those that come later, those that replace lost ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from mindspeed_asyncflow.errors import DeadlineExceeded, WorkerLost
from mindspeed_asyncflow.service import cleanup
from mindspeed_asyncflow.service.actors import Remote, here
from mindspeed_asyncflow.service.relays import Place

PLACED_S = 5.0  # replicas beyond the needed ones get this long to say where they run

GRACE_S = 1.0  # child processes of a dead replica get this long to end by themselves


class Replicas:
    """`spawn` asks for a process of a replica; `count`: replicas; `needed`: how many must be up before the run starts.
    `build` makes the worker of a replica in its process. One that is silent for `heartbeat_s` is lost."""

    def __init__(
        self,
        spawn: Callable[[int], Remote],
        count: int,
        needed: int,
        limit_s: float,
        build: Callable[[int], Awaitable[Any]],
        heartbeat_s: float,
    ) -> None:
        self.remotes = {index: spawn(index) for index in range(count)}
        self.needed, self.limit_s, self.heartbeat_s = needed, limit_s, heartbeat_s
        self.places: dict[int, Place] = {}
        self.up: dict[int, Remote] = {}
        self.lost: Callable[[int, WorkerLost], None] = lambda index, error: None  # told of each that was up and died
        self._spawn, self._build = spawn, build
        self._finding: dict[int, asyncio.Task[None]] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._watches: list[asyncio.Task[None]] = []
        self._belongings: dict[int, tuple[list[psutil.Process], set[Path]]] = {}

    async def find(self) -> bool:
        """Wait until the needed ones have a place; whether all have one."""
        self._finding = {i: _begun(self._find(i)) for i in self.remotes}
        await self._first(self._finding, self.places, "placed")
        if rest := [task for task in self._finding.values() if not task.done()]:
            await asyncio.wait(rest, timeout=PLACED_S)
        return len(self.places) == len(self.remotes)

    def start(self) -> None:
        """All begin to start, each as soon as it has a place."""
        self._starting = {i: _begun(self._start(i)) for i in self.remotes}

    async def enough(self) -> None:
        """Wait until the needed ones are up. Raises what the first of too many failed with, or `DeadlineExceeded`."""
        await self._first(self._starting, self.up, "started")

    def replace(self, index: int) -> None:
        """A new process in place of one that is dead, or will be ended here; `later` waits for it."""
        self.remotes[index].kill()
        self._forget(index)
        self.remotes[index] = self._spawn(index)
        self._finding[index] = _begun(self._find(index))
        self._starting[index] = _begun(self._start(index))

    async def later(self, index: int) -> None:
        """Wait until replica `index` is up. Raises what it will not come for; nobody waits for it any more then."""
        task = self._starting[index]
        try:
            await asyncio.wait([task], timeout=self.limit_s)
            if not task.done():
                raise DeadlineExceeded(f"rollout{index} is not up after another {self.limit_s:g} s")
            task.result()
            if index not in self.up:
                raise WorkerLost(f"rollout{index} died as soon as it was up")
        except Exception:
            task.cancel()
            self.remotes[index].kill()
            raise

    async def _first(self, tasks: dict[int, asyncio.Task[None]], there: dict[int, Any], what: str) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.limit_s
        while len(there) < self.needed:
            running = [task for task in tasks.values() if not task.done()]
            if len(there) + len(running) < self.needed:
                raise next(e for t in tasks.values() if t.done() and (e := t.exception()) is not None)
            done, _ = await asyncio.wait(
                running, timeout=max(0.0, until - loop.time()), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                missing = ", ".join(self.remotes[i].name for i, task in tasks.items() if not task.done())
                raise DeadlineExceeded(f"not {what} after {self.limit_s:g} s (workflow.start_timeout_s): {missing}")

    async def _find(self, index: int) -> None:
        self.places[index] = Place(*await self.remotes[index].where())

    async def _start(self, index: int) -> None:
        await self._finding[index]
        remote = self.remotes[index]
        await self._build(index)
        if self.places[index].node == here()[0]:  # on another machine the number would name another process
            self._belongings[index] = await asyncio.to_thread(_belongings, remote.pid)
        self.up[index] = remote
        self._watches.append(_begun(self._watch(index, remote)))

    async def _watch(self, index: int, remote: Remote) -> None:
        """Its death is noticed also while nobody asks it for anything."""
        try:
            await remote.watch(self.heartbeat_s)
        except WorkerLost as error:
            if self.remotes[index] is remote:  # else it is known, and another process has its place
                self._forget(index)
                self.lost(index, error)

    def _forget(self, index: int) -> None:
        self.up.pop(index, None)
        self.places.pop(index, None)
        if index in self._belongings:
            asyncio.get_running_loop().run_in_executor(None, _sweep, *self._belongings.pop(index))

    def close(self) -> None:
        """From now on nothing that ends is a loss."""
        for task in [*self._finding.values(), *self._starting.values(), *self._watches]:
            task.cancel()


def _begun(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose error waits for whoever asks, which may be nobody when the run ends before."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _belongings(pid: int) -> tuple[list[psutil.Process], set[Path]]:
    """Child processes of a replica, and files in shared memory that they and it have mapped."""
    try:
        process = psutil.Process(pid)
        children = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return [], set()
    return children, cleanup.shared_files([process, *children])


def _sweep(processes: list[psutil.Process], files: set[Path]) -> None:
    """What a dead replica left: its processes, and the shared memory that nobody else uses."""
    cleanup.end_processes(processes, GRACE_S)
    for file in files - cleanup.shared_files(list(psutil.process_iter())):
        file.unlink(missing_ok=True)
