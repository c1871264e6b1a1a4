"""Ray shells: one generic actor that builds a worker in its own process and passes calls on to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.observe.log import get_logger

ASIDE = "aside"  # Ray's name for the thread of the methods that run beside all others


def here() -> tuple[str, str]:
    """(id, address) of this process's node."""
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


class Host:
    """Lives in a Ray actor. Heavy libraries are loaded by `build`, in this process only."""

    def __init__(self) -> None:
        self.worker: Any = None

    def build(self, recipe: Callable[..., Any], *args: Any) -> int:
        """Make the worker; returns the process id."""
        self.worker = recipe(*args)
        return os.getpid()

    def where(self) -> tuple[str, str]:
        return here()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)

    def get(self, attribute: str) -> Any:
        return getattr(self.worker, attribute)


class Remote:
    """A worker elsewhere, whose methods can be awaited: `await remote.generate(...)`.

    An exception of the worker arrives as itself; a dead process as `WorkerLost` with the last words it wrote.
    """

    def __init__(self, handle: Any, name: str, aside: Collection[str] = ()) -> None:
        self._handle, self.name, self._aside = handle, name, aside
        self.pid = 0

    async def build(self, recipe: Callable[..., Any], *args: Any) -> Remote:
        self.pid = await self._await(self._handle.build.remote(recipe, *args))
        get_logger("service").debug("%s is process %d", self.name, self.pid)
        return self

    async def where(self) -> tuple[str, str]:
        return await self._await(self._handle.where.remote())

    async def get(self, attribute: str) -> Any:
        return await self._await(self._handle.get.remote(attribute))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        send = self._handle.call
        if method in self._aside:
            send = send.options(concurrency_group=ASIDE)

        async def call(*args: Any) -> Any:
            return await self._await(send.remote(method, *args))

        return call

    async def _await(self, reference: Any) -> Any:
        try:
            return await reference
        except RayTaskError as error:
            get_logger("service").debug("%s raised\n%s", self.name, error)
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except RayActorError as error:
            raise WorkerLost(f"{self.name} (process {self.pid or '?'}) died: {_short(error)}") from None

    def kill(self) -> None:
        """End the process; nothing to do where Ray itself has gone."""
        with contextlib.suppress(RayError):
            ray.kill(self._handle, no_restart=True)


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("class_name", "actor_id", "namespace", "name:")))


def spawn(name: str, *, resources: dict[str, float], concurrency: int = 1, aside: Collection[str] = ()) -> Remote:
    """Ask Ray for a process; it takes no CPU share, since a machine may hold more workers than cores.

    `concurrency` threads serve its calls, one more those of the methods named in `aside`: devices are bound to threads,
    so a trainer has one thread for all that computes.
    """
    groups: dict[str, Any] = {"concurrency_groups": {ASIDE: 1} if aside else {}}
    host = ray.remote(**groups)(Host).options(
        num_cpus=0, resources=resources, max_concurrency=concurrency, max_restarts=0, name=name
    )
    return Remote(host.remote(), name, aside)
