"""The rollout replicas of a run: those that it needs to start, those that come later, those that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from mindspeed_asyncflow.errors import DeadlineExceeded
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.service import cleanup
from mindspeed_asyncflow.service.actors import Remote, here
from mindspeed_asyncflow.service.relays import Place

PLACED_S = 5.0  # replicas beyond the needed ones get this long to say where they run


class Replicas:
    """`remotes`: processes by index of the replica; `needed`: how many must be up before the run starts. `build` makes
    the worker of a replica in its process."""

    def __init__(
        self, remotes: dict[int, Remote], needed: int, limit_s: float, build: Callable[[int], Awaitable[Any]]
    ) -> None:
        self.remotes, self.needed, self.limit_s = remotes, needed, limit_s
        self.places: dict[int, Place] = {}
        self.up: dict[int, Remote] = {}
        self.lost: Callable[[int], None] = lambda index: None  # told of each one that dies after it was up
        self._build = build
        self._finding: dict[int, asyncio.Task[None]] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._belongings: dict[int, tuple[list[psutil.Process], set[Path]]] = {}

    @property
    def starting(self) -> set[int]:
        return {i for i, task in self._starting.items() if not task.done()}

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
        for index, task in self._starting.items():
            if task.done() and (error := task.exception()) is not None:
                get_logger("service").warning("rollout%d did not start, the others go on: %s", index, error)
                self.give_up(index)

    def give_up(self, index: int) -> None:
        """Nobody waits for replica `index` any more."""
        self.remotes[index].kill()

    async def later(self, index: int) -> Exception | None:
        """Wait until replica `index` is up; the error that it will not come for."""
        task = self._starting[index]
        try:
            await asyncio.wait_for(asyncio.shield(task), self.limit_s)
        except asyncio.TimeoutError:
            task.cancel()
            return DeadlineExceeded(f"rollout{index} is not up after another {self.limit_s:g} s")
        except Exception as error:  # boundary: a replica that does not come is a warning while others are there
            return error
        return None

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
        remote.on_loss = lambda: self._died(index)
        self.up[index] = remote

    def _died(self, index: int) -> None:
        self.up.pop(index, None)
        if index in self._belongings:
            asyncio.get_running_loop().run_in_executor(None, _sweep, *self._belongings.pop(index))
        self.lost(index)


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
    cleanup.end_processes(processes, grace_s=1.0)
    for file in files - cleanup.shared_files(list(psutil.process_iter())):
        file.unlink(missing_ok=True)
