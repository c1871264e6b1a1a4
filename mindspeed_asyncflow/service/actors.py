"""Ray shells: one generic actor that builds a worker in its own process and passes calls on to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_asyncflow.errors import EngineError, WorkerLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.platforms.devices import VISIBLE_ENV, visible_to
from mindspeed_asyncflow.service.heartbeat import silence
from mindspeed_asyncflow.service.plain import send_arrays_plainly

ASIDE = "aside"  # Ray's name for the thread of the methods that run beside all others
BESIDE = "beside"  # and for those of a second worker in the same process
WATCH = "watch"  # and for the call that ends with the process
PING = "ping"  # and for those that show that it still runs
KILLED_S = 5.0  # a process that was killed is gone by then

_spawned = itertools.count()


def here() -> tuple[str, str]:
    """(id, address) of this process's node."""
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


class Host:
    """Lives in a Ray actor. Heavy libraries are loaded by `build`, in this process only."""

    def __init__(self) -> None:
        self.worker: Any = None
        send_arrays_plainly()
        if devices := self.devices():  # before anything can load the library that reads it
            os.environ[VISIBLE_ENV] = visible_to(devices, os.environ.get(VISIBLE_ENV))

    def build(self, recipe: Callable[..., Any], *args: Any) -> tuple[int, tuple[str, str], str]:
        """Make the worker; returns the process id, its node (id, address) and what it runs in."""
        self.worker = _crossing(recipe, *args)
        return os.getpid(), here(), _libraries()

    def where(self) -> tuple[str, str]:
        return here()

    def devices(self) -> list[str]:
        """Physical ids of the NPUs that Ray gave to this process; none where they are only counted."""
        return ray.get_runtime_context().get_accelerator_ids().get("NPU", [])

    def stay(self) -> None:
        """Never returns."""
        threading.Event().wait()

    def ping(self) -> None:
        """Answered whatever the worker computes."""

    def call(self, method: str, *args: Any) -> Any:
        """`method` of the worker; "part.method" of one that it is made of."""
        return _crossing(attrgetter(method)(self.worker), *args)

    def get(self, attribute: str) -> Any:
        return attrgetter(attribute)(self.worker)


def _crossing(work: Callable[..., Any], *args: Any) -> Any:
    """The result of `work`; an error of a library that the caller's environment need not have goes out as text."""
    try:
        return work(*args)
    except Exception as error:  # boundary between processes: every error goes on, as a class that both sides know
        kind = type(error)
        if kind.__module__.split(".")[0] in _KNOWN_EVERYWHERE:
            raise
        raise EngineError(f"{kind.__module__}.{kind.__qualname__}: {error}") from error


_KNOWN_EVERYWHERE = {__name__.split(".")[0], "ray", *sys.stdlib_module_names}


def _libraries() -> str:
    """Versions of Python and of the loaded libraries that may be others in another process of the run."""
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "numpy", "vllm")}
    python = "Python {}.{}.{}".format(*sys.version_info)
    return ", ".join([python, *(f"{name} {version}" for name, version in loaded.items() if version)])


class Remote:
    """A worker elsewhere, whose methods can be awaited: `await remote.generate(...)`.

    An exception of the worker arrives as itself; a dead process as `WorkerLost` with what Ray knows of its end.
    """

    def __init__(self, handle: Any, name: str, aside: Collection[str] = ()) -> None:
        self._handle, self.name, self._aside = handle, name, aside
        self.pid = 0
        self.built: Callable[[str, int, str], None] = lambda name, pid, host: None  # told where it runs
        self._node = self._why = ""  # where it runs; why it was killed
        self._process: psutil.Process | None = None  # where it runs on this machine

    async def build(self, recipe: Callable[..., Any], *args: Any) -> Remote:
        pid, (node, host), libraries = await self._await(self._handle.build.remote(recipe, *args))
        get_logger("service").debug("%s is process %d with %s", self.name, pid, libraries)
        self.pid, self._node = pid, node
        if node == here()[0]:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process = psutil.Process(pid)
        self.built(self.name, pid, host)
        return self

    async def watch(self, heartbeat_s: float) -> None:
        """Never returns; raises `WorkerLost` when the process, which must be built, dies, whether anybody calls it or
        not, or when it answers no ping for `heartbeat_s` (`service/heartbeat.py`): then it has been killed."""
        staying = asyncio.ensure_future(self._await(self._handle.stay.options(concurrency_group=WATCH).remote()))
        beating = asyncio.ensure_future(silence(self._ping, heartbeat_s))
        try:
            done, _ = await asyncio.wait([staying, beating], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises how it died
            self._why = f"froze and was killed: no answer to a ping for {heartbeat_s:g} s (faults.heartbeat_s)"
            self._end_frozen()
            await asyncio.wait([staying], timeout=KILLED_S)
        finally:
            for task in (staying, beating):
                task.cancel()
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise WorkerLost(f"{self.name} (process {self.pid}) {self._why}")

    async def _ping(self) -> None:
        await self._await(self._handle.ping.options(concurrency_group=PING).remote())

    def _end_frozen(self) -> None:
        """As `kill`, also on another machine: Ray asks a process to end, which a frozen one does not."""
        self.kill()
        if self._process is None and self._node:
            there = NodeAffinitySchedulingStrategy(self._node, soft=False)
            with contextlib.suppress(RayError):
                _kill.options(scheduling_strategy=there).remote(self.pid)

    async def where(self) -> tuple[str, str]:
        return await self._await(self._handle.where.remote())

    async def devices(self) -> list[str]:
        return await self._await(self._handle.devices.remote())

    async def get(self, attribute: str) -> Any:
        return await self._await(self._handle.get.remote(attribute))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return self.method(method, ASIDE if method in self._aside else "")

    def method(self, path: str, group: str = "") -> Callable[..., Any]:
        """An awaitable call of the worker's `path`, in the threads of `group`."""
        send = self._handle.call
        if group:
            send = send.options(concurrency_group=group)

        async def call(*args: Any) -> Any:
            return await self._await(send.remote(path, *args))

        return call

    async def _await(self, reference: Any) -> Any:
        try:
            return await reference
        except RayTaskError as error:
            get_logger("service").debug("%s raised\n%s", self.name, error)
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except RayActorError as error:
            why = self._why or f"died: {short_death(str(error))}"
            raise WorkerLost(f"{self.name} (process {self.pid or '?'}) {why}") from None

    def dismiss(self) -> None:
        """Have Ray end the process, which a frozen one may not follow; nothing to do where Ray itself has gone."""
        with contextlib.suppress(RayError):
            ray.kill(self._handle, no_restart=True)

    def kill(self) -> None:
        """End the process, also a frozen one on this machine."""
        self.dismiss()
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.kill()


@ray.remote(num_cpus=0, max_retries=0)
def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class Part:
    """One of the workers that a remote worker is made of, as a worker of its own; served by the threads of `group`."""

    def __init__(self, whole: Remote, part: str, name: str, group: str = "", aside: Collection[str] = ()) -> None:
        self._whole, self._part, self.name, self._group, self._aside = whole, part, name, group, aside

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return self._whole.method(f"{self._part}.{method}", ASIDE if method in self._aside else self._group)


_DETAIL = "Worker exit detail: "
_GUESSES = re.compile(r" (There are some potential root causes|Some common causes include)\b.*")  # by Ray's version
_FIELDS = ("class_name", "actor_id", "namespace", "name:", "pid:", "ip:")
_LONGEST = 300  # characters


def short_death(text: str) -> str:
    """What happened, out of Ray's paragraph about the death of an actor."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " ".join(line for line in lines if not line.startswith(_FIELDS))
    detail = said.partition(_DETAIL)[2] or said
    what = _GUESSES.sub("", detail)
    if what != detail:
        what += " It was killed, by hand or for its use of memory, or it crashed."
    return what if len(what) <= _LONGEST else what[:_LONGEST].rpartition(" ")[0] + " ..."


def spawn(
    name: str,
    *,
    resources: dict[str, float],
    concurrency: int = 1,
    aside: Collection[str] = (),
    beside: int = 0,
    node: str = "",
    python: str = "",
    environment: dict[str, str] | None = None,
) -> Remote:
    """Ask Ray for a process; it takes no CPU share, since a machine may hold more workers than cores.

    `concurrency` threads serve its calls, as many more those of the methods named in `aside`, `beside` more those of a
    second worker in the process: devices are bound to threads, so a trainer has one thread for all that computes.
    `node`: Ray's id of the node where it must run; default: any. `python`: its interpreter; default: that of the run.
    """
    send_arrays_plainly()
    surroundings: dict[str, Any] = {"env_vars": environment} if environment else {}
    if python:
        surroundings["py_executable"] = shlex.quote(python)  # Ray hands it to a shell
    groups = {WATCH: 1, PING: 1} | ({ASIDE: len(aside)} if aside else {}) | ({BESIDE: beside} if beside else {})
    options: dict[str, Any] = {"concurrency_groups": groups}
    host = ray.remote(**options)(Host).options(
        num_cpus=0,
        resources=resources,
        max_concurrency=concurrency,
        max_restarts=0,
        name=f"{name}.{next(_spawned)}",  # the name of a dead process is not free at once
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False) if node else "DEFAULT",
        runtime_env=surroundings or None,
    )
    return Remote(host.remote(), name, aside)
