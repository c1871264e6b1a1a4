"""The training group: trainer and critic ranks, and the replicas on their devices. It lives and dies together.

a rank dies or freezes ─► the loops end ─► the rest of the group is killed; replicas elsewhere stop what they answer
    ─► the group is started again ─► it and the driver go back to the newest checkpoint, or to version 0 ─► the loops
       go on with the same replicas, scorer and dock

So it does where a dock pair has lost the memory with rows that the running step had begun with: their gradients are in
the sums of the step already, or in those of some ranks only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from mindspeed_asyncflow.errors import AsyncFlowError, StaleHandle, WorkerLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.service import resuming
from mindspeed_asyncflow.service.session import Session

NOTICE_S = 5.0  # an error of a rank whose neighbour died comes first; the death is known by then
STOP_AGAIN_S = 0.05


class Recovery:
    """`train` in place of the session's. Lives in the driver's event loop, from when all processes are up."""

    def __init__(self, session: Session, say: Callable[[str], None]) -> None:
        self.session, self.say = session, say
        self._watches: list[asyncio.Task[None]] = []

    async def train(self) -> None:
        """All steps, whatever becomes of the group's processes. Raises `WorkerLost` where it was lost too often."""
        session = self.session
        self._watch()
        try:
            while (lost := await self._train()) is not None:
                before = session.run
                try:
                    await session.supervision.replace(*lost, self._again)
                except WorkerLost:
                    session.run = before  # what the run came to
                    raise
                self.say("training goes on")
        finally:
            self._stop_watching()

    async def _train(self) -> tuple[str, AsyncFlowError] | None:
        """Train to the end, or until the group must begin again: who was lost, and how."""
        training = asyncio.ensure_future(self.session.train())
        try:
            await asyncio.wait([training, *self._watches], return_when=asyncio.FIRST_COMPLETED)
            if training.done() and training.exception() is not None:
                await asyncio.wait(self._watches, timeout=NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            training.cancel()
            await asyncio.wait([training])
        if not training.cancelled() and training.exception() is None:
            return None
        for watch in self._watches:
            if watch.done() and isinstance(error := watch.exception(), WorkerLost):
                return watch.get_name(), error
        error = None if training.cancelled() else training.exception()
        return ("trainer", error) if isinstance(error, StaleHandle) else training.result()  # raises

    def _watch(self) -> None:
        heartbeat_s = self.session.config.faults.heartbeat_s
        others = self.session.replicas.remotes  # that go on without a replica on a rank's device
        members = [w for w in self.session.group() if not (others and w.name.startswith("rollout"))]
        self._watches = [asyncio.create_task(w.watch(heartbeat_s), name=w.name) for w in members]

    def _stop_watching(self) -> None:
        for watch in self._watches:
            watch.cancel()
            watch.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _again(self) -> None:
        """The whole group in new processes, at the newest checkpoint."""
        session = self.session
        self._stop_watching()
        session.run = None
        session.end_group()
        await self._quieten()
        await self._release()
        await session.start_group()
        await session.abandon()  # first: one that is being completed may become the newest, and older ones go
        folder = await asyncio.to_thread(resuming.newest, session.folder)
        said = "version 0, as there is no checkpoint yet" if folder is None else f"checkpoint {folder.name}"
        get_logger("service").warning("trainer and critic ranks are up again and go on from %s", said)
        await session.restore(folder)
        await session.prepare(self.say)
        self._watch()

    async def _release(self) -> None:
        """Nobody holds rows any more: they are about to be replaced by those of the checkpoint."""
        session = self.session
        assert session.dock is not None
        answers = [f"rollout{i}" for i in range(len(session.sync.replicas))]
        refer = [f"reference{i}" for i in range(len(session.references))]
        for worker in ("trainer", "critic", "scorer", *refer, *answers):
            await session.within(session.dock.forget_worker(worker), f"the dock to release what {worker} holds")

    async def _quieten(self) -> None:
        """Replicas that stay end what they answer, which nobody asks for any more, and take an older version next."""
        for index, replica in list(self.session.replicas.up.items()):
            name = f"rollout{index}"
            with contextlib.suppress(WorkerLost):  # whoever watches replicas learns of it too
                while await self.session.within(replica.running(), f"{name} to say what it answers"):
                    await self.session.within(replica.stop(), f"{name} to stop answering")
                    await asyncio.sleep(STOP_AGAIN_S)
                await self.session.within(replica.method("engine.go_back")(), f"{name} to go back")
