"""Where one replica answers clients: from the first request to the last one that it has at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspeed_asyncflow.errors import EngineError, WorkerLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.workflow.clock import now
from mindspeed_asyncflow.workflow.completing import AnswerPart
from mindspeed_asyncflow.workflow.weight_sync import NOTHING

if TYPE_CHECKING:
    from mindspeed_asyncflow.service.pool import Answer, Pool, Serving

LOOK_AGAIN_S = 0.1
NEWS_S = 1.0  # one question for news waits so long
ENGINE_GRACE_S = 10.0  # the engine's deadline lies so far behind that of whoever asked


class Desk:
    """One of a `Pool`. Its answers go back to the pool when the replica does not go on with them."""

    def __init__(self, pool: Pool, serving: Serving, index: int) -> None:
        self._pool, self._serving, self._index = pool, serving, index
        self._sync, self._turns = serving.sync, serving.turns
        self._worker: Any = serving.sync.replicas[index]
        self._inbox: list[Answer] = []
        self._open: dict[str, Answer] = {}  # asked of the engine, by request id
        self._unwanted: list[str] = []
        self._wake = asyncio.Event()
        self.closed = False  # takes no more answers
        self.task = asyncio.ensure_future(self._serve())

    def __len__(self) -> int:
        return len(self._inbox) + len(self._open)

    def is_of(self, serving: Serving) -> bool:
        """Whether the desk is about the weights that `serving` has now."""
        return self._sync is serving.sync

    def take(self, answer: Answer) -> None:
        answer.desk = self
        self._inbox.append(answer)
        self._wake.set()

    def drop(self, answer: Answer) -> None:
        """Nobody wants more of this answer."""
        if answer in self._inbox:
            self._inbox.remove(answer)
        else:
            self._unwanted += [name for name, other in self._open.items() if other is answer]
        self._wake.set()

    async def _serve(self) -> None:
        why = ""
        try:
            async with self._turns.generating(self._index):
                if await self._has_weights():
                    with self._serving.recorder.busy(f"rollout{self._index}"):
                        await self._talk()
        except WorkerLost as error:
            get_logger("service").warning("completions of rollout%d go on elsewhere: %s", self._index, error)
        except Exception as error:  # boundary: whoever asked is told, the run hears of it by its own loops
            why = str(error) or type(error).__name__
            get_logger("service").warning("rollout%d cannot answer clients: %s", self._index, why)
        finally:
            self.closed = True
            for answer in reversed([*self._open.values(), *self._inbox]):
                self._pool.again(answer, why)
            self._open, self._inbox = {}, []
        await asyncio.sleep(LOOK_AGAIN_S)  # until others know that it is lost, or not open
        self._pool.ended(self._index)

    async def _has_weights(self) -> bool:
        """The replica serves a published version: the newest where it is between two batches. False: nobody waits for
        that any more."""
        sync, index = self._sync, self._index
        while len(self):
            if sync.replicas[index] is not self._worker:
                raise WorkerLost(f"rollout{index} has gone")
            if (loading := self._load()) is not None:
                await asyncio.wait([loading])
            if sync.served[index] != NOTHING:
                return True
            await asyncio.sleep(LOOK_AGAIN_S)
        return False

    def _load(self) -> asyncio.Task[None] | None:
        """Where the replica is between two batches and there is something newer, it begins to load that."""
        run = self._serving.run
        behind = self._sync.is_behind(self._index) and not self._sync.locks[self._index].locked()
        return run.job.spawn(self._bring_up()) if behind and run is not None and not run.over else None

    async def _bring_up(self) -> None:
        """In a task of the run, which ends with weights that are wrong."""
        with contextlib.suppress(WorkerLost):  # its loops are told by others
            await self._sync.bring_up(self._index)

    async def _talk(self) -> None:
        news: asyncio.Task[list[AnswerPart]] | None = None
        loading: asyncio.Task[None] | None = None
        try:
            while len(self):
                self._wake.clear()
                if loading is None or loading.done():
                    loading = self._load()
                if not self.closed and not self._turns.is_open(self._index):
                    self._give_back()
                await self._ask()
                if self._unwanted:
                    names, self._unwanted = self._unwanted, []
                    await self._call("drop")(names)
                news = news or asyncio.ensure_future(self._call("news")(NEWS_S))
                woken = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait([news, woken], timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                if news.done():
                    parts, news = news.result(), None
                    self._hand_out(parts)
        finally:
            if news is not None:
                news.cancel()
            if loading is not None:  # the device may go as soon as nobody is here
                await asyncio.wait([loading])

    async def _ask(self) -> None:
        if not self._inbox:
            return
        answers, self._inbox = self._inbox, []
        asked = {(request := answer.next_request()).request_id: (request, answer) for answer in answers}
        self._open |= {name: answer for name, (_, answer) in asked.items()}
        limit_s = max(answer.deadline for answer in answers) - now() + ENGINE_GRACE_S
        try:
            await self._call("ask")([request for request, _ in asked.values()], limit_s)
        except EngineError as error:
            for name, (_, answer) in asked.items():
                del self._open[name]
                self._pool.again(answer, str(error))

    def _give_back(self) -> None:
        """The trainer wants its device: what runs ends here, and what has not begun goes elsewhere or waits."""
        self.closed = True
        self._unwanted += [name for name in self._open if name not in self._unwanted]
        inbox, self._inbox = self._inbox, []
        for answer in inbox:
            self._pool.again(answer)

    def _hand_out(self, parts: list[AnswerPart]) -> None:
        for part in parts:
            answer = self._open.get(part.request_id)
            if answer is None:  # of a desk before this one
                continue
            if part.reason:
                del self._open[part.request_id]
                self._pool.room()
            if not answer.over:
                answer.take(part, ends=part.reason in ("stop", "length"))
            if part.reason in ("abort", "error"):
                self._pool.again(answer, part.why)

    def _call(self, method: str) -> Callable[..., Any]:
        return getattr(self._worker, f"completing.{method}")
