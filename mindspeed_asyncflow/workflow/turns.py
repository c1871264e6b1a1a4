"""Turns on devices that trainer ranks and rollout replicas share.

                 generating(i): give, rouse i                 training(): rest, take back
    TRAINER  ─────────────────────────────────►  REPLICAS  ─────────────────────────────────►  TRAINER
    state on the device, replicas asleep         state on the host, replicas awake

The devices stay with the side that had them last until the other one asks: the first replica that has something to
answer makes all trainer ranks give, and the trainer asks when its batch is there. What a replica serves is gone when it
rests, so that its next boundary (`weight_sync.py`), inside `generating`, loads the newest weights.

    who                waits for                                         unblocked by
    open, generating   the trainer does not want its devices             the end of `training`
    training           no replica is inside `generating`                 their batches end (`interrupt`: are stopped)

A `training` that waits lets nobody in, and whoever is inside `generating` waits for nothing that a trainer does on its
devices: answers of a batch that is claimed, weights that were written before they left. So neither waits for ever; the
watchdog of the run bounds both waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.workflow.clock import now

STOP_AGAIN_S = 0.25  # a replica may be asked to stop before its batch has reached the engine


class GivesDevice(Protocol):
    """A trainer rank."""

    async def give(self) -> Any: ...

    async def take_back(self) -> Any: ...


class SharesDevice(Protocol):
    """A rollout replica on devices of trainer ranks."""

    async def rouse(self) -> Any: ...

    async def rest(self) -> Any: ...

    async def stop(self) -> int: ...


class Turns:
    """Lives in the driver's event loop. At the beginning the trainer has the devices and all `replicas` are asleep.

    `interrupt`: replicas inside a batch are stopped when the trainer wants its devices (lent devices); else their batch
    is waited for (colocated). `emptied(index)` is told when a replica has lost its weights. Errors of a trainer rank
    end every turn; a replica that is lost is left out.
    """

    def __init__(
        self,
        trainers: Sequence[GivesDevice],
        replicas: Mapping[int, SharesDevice],
        *,
        interrupt: bool,
        emptied: Callable[[int], None],
    ) -> None:
        self._trainers, self._replicas = list(trainers), dict(replicas)
        self._sharing = set(replicas)  # without those that are lost or left
        self._interrupt, self._emptied = interrupt, emptied
        self._open = asyncio.Event()  # the trainer does not want its devices
        self._open.set()
        self._reopening: asyncio.TimerHandle | None = None
        self._training = asyncio.Lock()  # one block of the trainer at a time
        self._moving = asyncio.Lock()  # devices change hands
        self._inside: dict[int, int] = {}  # blocks of each replica
        self._empty = asyncio.Event()  # no replica is inside
        self._empty.set()
        self._awake: set[int] = set()
        self._rousing = {index: asyncio.Lock() for index in replicas}
        self._given = False
        self._failure: BaseException | None = None
        self._doing = ""
        self.give_s = self.take_s = 0.0  # of the last turn: train state left; replicas went to rest and it came back
        self.count = 0  # times that the trainer gave its devices

    def shares(self, index: int) -> bool:
        """Whether replica `index` takes turns with the trainer."""
        return index in self._sharing

    def is_open(self, index: int) -> bool:
        """Whether replica `index` may begin a batch now."""
        return not self.shares(index) or self._open.is_set()

    async def open(self, index: int) -> None:
        """Wait until the trainer does not want the devices of replica `index`. Takes nothing, and may be over again
        when the caller has found something to answer."""
        if self.shares(index):
            await self._open.wait()
            self._check()

    @contextlib.asynccontextmanager
    async def generating(self, index: int) -> AsyncIterator[None]:
        """Around a batch of replica `index`, its boundary included: it is awake inside."""
        if not self.shares(index):
            yield
            return
        while not self._open.is_set():  # it may close again before this task runs
            await self._open.wait()
        self._inside[index] = self._inside.get(index, 0) + 1
        self._empty.clear()
        await self._to_its_end(self._enter(index), lambda: self._leave(index))
        try:
            yield
        finally:
            self._leave(index)

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Around work of trainer ranks on their devices: all train state is there inside. Not inside itself."""
        async with self._training:
            self._close()
            try:
                await self._drain()
                await self._to_its_end(self._take_back())
                yield
            finally:
                self._reopen()

    def forget(self, index: int) -> None:
        """Replica `index` is lost or has left: it has no turn any more. A block that it is still inside is waited for,
        and if it lives and is awake it still goes to rest."""
        self._sharing.discard(index)

    def describe(self) -> str:
        """One line for messages of the no-progress watchdog."""
        where = "replicas" if self._given else "trainer"
        words = [f"devices are with the {where}"]
        if self._doing:
            words.append(f"changing hands: {self._doing}")
        if not self._open.is_set():
            words.append("the trainer has its turn or waits for it")
        if self._inside:
            words.append("answering: " + ", ".join(f"rollout{i}" for i in sorted(self._inside)))
        return "turns: " + "; ".join(words)

    # ---- changes of hands --------------------------------------------------------------------------------------------

    async def _enter(self, index: int) -> None:
        async with self._moving:
            self._check()
            if not self._given:
                self.give_s = await self._all("train state leaves", (t.give() for t in self._trainers))
                self._given, self.count = True, self.count + 1
        async with self._rousing[index]:
            if index in self._sharing and index not in self._awake:
                await self._replicas[index].rouse()
                self._awake.add(index)

    async def _take_back(self) -> None:
        async with self._moving:
            self._check()
            if self._given:
                rested_s = await self._all("replicas go to rest", map(self._rest, sorted(self._awake)))
                back_s = await self._all("train state comes back", (t.take_back() for t in self._trainers))
                self._given, self.take_s = False, rested_s + back_s

    async def _all(self, what: str, parts: Iterable[Awaitable[Any]]) -> float:
        """Seconds that all parts took. What one raises is raised in all later turns: nobody has the devices then."""
        began, self._doing = now(), what
        try:
            await asyncio.gather(*parts)
        except BaseException as error:
            self._failure = error
            self._open.set()  # those who wait learn it
            raise
        finally:
            self._doing = ""
        return now() - began

    async def _rest(self, index: int) -> None:
        try:
            await self._replicas[index].rest()
        except WorkerLost:  # the loops are told so by others
            self.forget(index)
        self._awake.discard(index)
        self._emptied(index)

    async def _drain(self) -> None:
        """No replica is inside any more."""
        left = asyncio.ensure_future(self._empty.wait())
        try:
            while not left.done():
                if self._interrupt:
                    await asyncio.gather(*map(self._stop, sorted(self._inside)))
                await asyncio.wait([left], timeout=STOP_AGAIN_S if self._interrupt else None)
        finally:
            left.cancel()

    async def _stop(self, index: int) -> None:
        if index in self._awake:
            with contextlib.suppress(WorkerLost):  # its batch says so
                await self._replicas[index].stop()

    async def _to_its_end(self, move: Coroutine[Any, Any, None], undo: Callable[[], None] = lambda: None) -> None:
        """Do all of `move`, also when the caller is cancelled meanwhile: what is half moved would serve nobody. `undo`
        follows where the caller does not go on."""
        moving = asyncio.ensure_future(move)

        def ended(done: asyncio.Future[None]) -> None:
            done.cancelled() or done.exception()  # a caller that has gone does not hear of it
            undo()

        try:
            await asyncio.shield(moving)
        except BaseException:
            moving.add_done_callback(ended)
            raise

    def _leave(self, index: int) -> None:
        left = self._inside[index] - 1
        if left:
            self._inside[index] = left
            return
        del self._inside[index]
        if not self._inside:
            self._empty.set()

    def _close(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None
        self._open.clear()

    def _reopen(self) -> None:
        """Lent devices: not before the trainer has waited for as long as a turn of others takes, there and back. It may
        have its next batch at once, and this way never loses more than it waits anyway."""
        patience_s = self.give_s + self.take_s if self._interrupt else 0.0
        if patience_s > 0:
            self._reopening = asyncio.get_running_loop().call_later(patience_s, self._open.set)
        else:
            self._open.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class NoTurns(Turns):
    """Trainer and replicas own their devices: nobody waits."""

    def __init__(self) -> None:
        super().__init__([], {}, interrupt=False, emptied=lambda index: None)

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield

    def describe(self) -> str:
        return ""
