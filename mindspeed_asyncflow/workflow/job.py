"""What all loops of a run share, and the few calls that they have in common."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import Claim
from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded, StaleHandle, WorkerReplaced
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.observe.trace import get_tracer
from mindspeed_asyncflow.workflow.book import StepBook
from mindspeed_asyncflow.workflow.clock import now
from mindspeed_asyncflow.workflow.dock_port import Dock
from mindspeed_asyncflow.workflow.events import NoEvents
from mindspeed_asyncflow.workflow.recorder import StepRecorder
from mindspeed_asyncflow.workflow.staleness import StalenessWindow
from mindspeed_asyncflow.workflow.turns import Turns
from mindspeed_asyncflow.workflow.weight_sync import WeightSync

LOOK_AGAIN_S = 5.0  # what a claim waits for may have been lost with a dock pair
MOST_NAMED = 8  # calls that a message names


@dataclass(slots=True)
class Crew:
    """The workers, as proxies whose methods can be awaited (`workflow/*worker*.py`)."""

    rollouts: dict[int, Any]  # those that are up, by index
    scorer: Any
    references: list[Any]
    trainers: list[Any]
    leaders: list[int]  # indices of one trainer rank of every data-parallel replica
    starting: set[int] = field(default_factory=set)  # indices of replicas that may still join
    end: Callable[[int], None] = lambda index: None  # ends the process of a replica that answers nobody any more
    critics: list[Any] = field(default_factory=list)  # all critic ranks; none where no critic is trained
    comes_back: Callable[[int], bool] = lambda index: False  # whether a dead replica will have a new process


@dataclass(frozen=True, slots=True)
class Hooks:
    """Where the loops of a run that is driven from outside wait for somebody there; None: they do not."""

    ready: Callable[[int], Awaitable[None]] | None = None  # until so many prompts are there
    permitted: Callable[[int], Awaitable[None]] | None = None  # until replicas may have this version


class Job:
    """One per run. Lives in the driver's event loop."""

    def __init__(
        self,
        config: Config,
        dock: Dock,
        crew: Crew,
        sync: WeightSync,
        recorder: StepRecorder,
        turns: Turns,
        events: NoEvents,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.config, self.dock, self.crew, self.sync, self.recorder = config, dock, crew, sync, recorder
        self.turns, self.events, self.spawn = turns, events, spawn
        self.window = StalenessWindow(config.workflow.max_lag)
        self.book = StepBook(config.algorithm.group_size)
        self.step = 0
        self.progress_at = now()
        self._calls: dict[object, tuple[str, str, float]] = {}  # under way: whom, what, since

    async def claim(self, task: str, count: int, *, worker: str, **how: Any) -> Claim:
        """Rows for `task`, as soon as there are any."""
        with get_tracer().span(f"wait/{task}", lane=f"{worker} waits"):
            while True:
                claim = await self.dock.claim(task, count, worker=worker, **how)
                if len(claim.rows):
                    return claim
                await asyncio.sleep(0)  # a sealed partition answers at once: the run is ending

    async def claim_now(self, task: str, count: int, *, worker: str, timeout_s: float, **how: Any) -> Claim | None:
        """As `claim`; None when nothing came in time."""
        with get_tracer().span(f"wait/{task}", lane=f"{worker} waits"):
            try:
                return await self.dock.claim(task, count, worker=worker, timeout_s=timeout_s, **how)
            except DeadlineExceeded:
                return None

    async def claim_groups(self, task: str, groups: Sequence[int], *, worker: str) -> Claim | None:
        """All of these groups, without those that leave the book meanwhile; None where none is left."""
        while left := [group for group in groups if self.book.is_open(group)]:
            ask: dict[str, Any] = {"group_ids": left, "at_least": len(left), "timeout_s": LOOK_AGAIN_S}
            claim = await self.claim_now(task, len(left), worker=worker, **ask)
            if claim is not None and len(claim.rows):
                return claim
            await asyncio.sleep(0)  # a sealed partition answers at once: the run is ending
        return None

    async def all_of(
        self, task: str, groups: Sequence[int], worker: str, work: Callable[[Claim], Awaitable[bool]]
    ) -> None:
        """`work` on all of these groups as one claim; what it leaves undone is claimed again until nothing is left."""
        claim = await self.claim_groups(task, groups, worker=worker)
        if claim is None or await work(claim):
            return
        while True:
            rest = await self.claim_now(task, len(groups), worker=worker, group_ids=groups, timeout_s=0.0)
            if rest is None or not len(rest.rows):
                return
            await work(rest)

    async def attempt(self, worker: str, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the work was done. False where the process of `worker` was replaced meanwhile, or the claim on its
        rows was lost, as with a dock pair that was started again (rows that nobody holds may go at any time): all that
        it holds is offered again."""
        try:
            await work
        except (WorkerReplaced, ClaimLost, StaleHandle) as error:
            held = await self.dock.forget_worker(worker)
            get_logger("workflow").warning("%s begins again with what it had (%d claims): %s", worker, held, error)
            return False
        return True

    async def all_ranks(self, method: str, *args: Any) -> list[Any]:
        return await self.of_all("trainer", self.crew.trainers, method, args)

    async def of_all(self, kind: str, workers: Sequence[Any], method: str, args: tuple[Any, ...]) -> list[Any]:
        """One call of every worker at the same time; `kind` and its place are what messages call a worker."""
        return list(await asyncio.gather(*(self._one(f"{kind}{i}", w, method, args) for i, w in enumerate(workers))))

    async def _one(self, name: str, worker: Any, method: str, args: tuple[Any, ...]) -> Any:
        with self.calling(name, method):
            return await getattr(worker, method)(*args)

    @contextlib.contextmanager
    def calling(self, whom: str, what: str) -> Iterator[None]:
        """Around a call of a worker: a message of the watchdog names the ones that hang."""
        key = object()
        self._calls[key] = whom, what, now()
        try:
            yield
        finally:
            del self._calls[key]

    def describe(self) -> str:
        """Who works on what, the longest first."""
        calls = sorted(self._calls.values(), key=lambda call: call[2])[:MOST_NAMED]
        words = [f"{whom} has been in `{what}` for {now() - since:.1f} s" for whom, what, since in calls]
        return "workers: " + ("; ".join(words) or "nobody has work")

    def progressed(self) -> None:
        self.progress_at = now()

    @property
    def interruptible(self) -> bool:
        """Whether answers can be interrupted, so that rows of one group go on at different times and places."""
        w = self.config.workflow
        return bool(w.partial_rounds or w.lend or w.repack_below)
