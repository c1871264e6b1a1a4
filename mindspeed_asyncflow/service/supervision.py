"""A process of a run that dies, or is ended because it froze, is started again, at most `faults.max_restarts` times.

process dies ─► `watch` ends ─► note "lost" ─► again() ─► note "recovered" ─► calls under way: `WorkerReplaced`
                                     └─ lost too often, or again() fails too often ─► `WorkerLost` ends the run
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from mindspeed_asyncflow.config.faults import FaultsConfig
from mindspeed_asyncflow.errors import WorkerLost, WorkerReplaced
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.workflow.clock import in_time, now

T = TypeVar("T")
NOTICE_S = 10.0  # the watch of a process sees its death by then


class Watched(Protocol):
    """A worker in a process of its own, as `actors.Remote`."""

    name: str

    async def watch(self, heartbeat_s: float) -> None:
        """Never returns; raises `WorkerLost` when the process is dead, also by its hand because it froze."""
        ...


class Supervision:
    """Of all components of a run. `note` is that of the event record. Lives in the driver's event loop."""

    def __init__(self, faults: FaultsConfig, note: Callable[..., None]) -> None:
        self.max_restarts, self.heartbeat_s, self._note = faults.max_restarts, faults.heartbeat_s, note
        self.restarts: Counter[str] = Counter()  # by component
        self._kept: list[Kept] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def keep(self, worker: Watched, again: Callable[[], Awaitable[Watched]]) -> Kept:
        """The worker under a name that stays while its process changes. `again` starts a new one, in bounded time."""
        kept = Kept(self, worker, again)
        self._kept.append(kept)
        return kept

    async def replace(self, name: str, error: Exception, again: Callable[[], Awaitable[T]]) -> T:
        """`name` is dead: what `again` gives in its place. Raises `WorkerLost` when that was needed too often."""
        began = now()
        self._note("lost", component=name, why=str(error))
        while True:
            if self.restarts[name] >= self.max_restarts:
                raise WorkerLost(
                    f"{name} was started again {self.max_restarts} times (faults.max_restarts) and is lost: {error}"
                ) from error
            self.restarts[name] += 1
            get_logger("service").warning(
                "%s is lost and is started again (%d of %d): %s", name, self.restarts[name], self.max_restarts, error
            )
            try:
                found = await again()
            except Exception as failed:  # boundary: whatever a start fails with, it is tried again
                error = failed
                continue
            seconds = now() - began
            self._note("recovered", component=name, seconds=round(seconds, 3))
            get_logger("service").warning("%s is back after %.1f s", name, seconds)
            return found

    def give_up(self, error: WorkerLost) -> None:
        """A component will not come back."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # a run that ends in this moment waits for it no more

    async def failure(self) -> None:
        """Never returns; raises `WorkerLost` when a component will not come back."""
        await asyncio.shield(self._failure)

    def close(self) -> None:
        """From now on nothing that ends is a loss."""
        for kept in self._kept:
            kept.close()
        self._failure.cancel()


class Kept:
    """A worker whose methods can be awaited, as those of `actors.Remote`: `await kept.score(...)`.

    While its process is being replaced calls wait. A call whose process dies ends in `WorkerReplaced` when another one
    is up, which has nothing of the old one's work, or in `WorkerLost` when none will be.
    """

    def __init__(self, supervision: Supervision, worker: Watched, again: Callable[[], Awaitable[Watched]]) -> None:
        self.name, self.worker = worker.name, worker
        self._supervision, self._again = supervision, again
        self._news = asyncio.Event()  # set, and replaced, when the worker is another one, or will not come back
        self._lost: WorkerLost | None = None
        self._down = False
        self._keeping = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while True:
            try:
                await self.worker.watch(self._supervision.heartbeat_s)
            except WorkerLost as error:
                self._down = True
                try:
                    self.worker = await self._supervision.replace(self.name, error, self._again)
                    self._down = False
                except WorkerLost as final:
                    self._lost = final
                    self._supervision.give_up(final)
                    return
                finally:
                    self._news.set()
                    self._news = asyncio.Event()

    async def there(self) -> Any:
        """The worker, as soon as its process is up. Raises `WorkerLost` when it will not be."""
        while self._down and self._lost is None:
            await self._news.wait()
        if self._lost is not None:
            raise self._lost
        return self.worker

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            worker = await self.there()
            try:
                return await getattr(worker, method)(*args)
            except WorkerLost as error:
                await self._noticed(worker)
                if self._lost is not None:
                    raise self._lost from error
                if self.worker is worker:  # it lives: what it waited for was lost
                    raise
                raise WorkerReplaced(f"{error}; another process has its place") from error

        return call

    async def _noticed(self, worker: Watched) -> None:
        """Wait until `worker` has been replaced, or will not be; not for long where the watch does not see it dead."""
        until = now() + NOTICE_S
        while self.worker is worker and self._lost is None and (self._down or now() < until):
            with contextlib.suppress(asyncio.TimeoutError):
                await in_time(self._news.wait(), NOTICE_S)

    def close(self) -> None:
        self._keeping.cancel()
