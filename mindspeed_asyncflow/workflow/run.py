"""The loops of a run, and the map of them.

          feed ──put──► [dock] ──► answer × R ──► [dock] ──► score ──► [dock] ──► train ──► weights
           ▲                ▲          │ unfinished  └──► reference (if kl_coef > 0) ──┘        │
           │                └──────────┘                                                       │
           └───────── window opens when a version is published ◄── [relay] ◄── publish ◄───────┘

    loop        file          consumes                    waits for                          unblocked by
    feed        feeding.py    prompts of the data stream  batch j <= published + max_lag     publish
    answer      answering.py  task `rollout`              groups put; weights loaded; turn   feed; publish; train
    update      weight_sync   published versions          the next one (`in_flight` only)    publish
    repack      answering.py  the last answers            nothing waits, all replicas answer (time)
    score       scoring.py    task `reward`, groups       answers of a whole group           answer
    reference   scoring.py    task `reference`, groups    answers of a whole group           answer
    value       valuing.py    task `value`, groups        scored groups (algorithm gae)      score (and reference)
    train       training.py   task `train`, groups        scored groups; turn                score (reference, value)
    publish     training.py   versions that train made    every rank wrote its shards        train
    evaluate    evaluating.py a version, every N of them  boundaries of replicas                     answer
    watchdog    run.py        -                           no progress for watchdog_s         ends the run, names who
                                                                                             waits for whom

Loops carry row ids; only workers touch tensors. What they share is a `Job` (job.py); time comes from the event loop
(clock.py) and rows from a port (dock_port.py), so that `simulation/` runs these very loops on virtual time.

Step k trains at version k and makes version k+1. Trainer ranks write it to the relay while they train step k+1, so
publish runs beside train; only the next optimizer step waits for it. How a replica comes to new weights
(`workflow.update`) is in weight_sync.py, who has devices that are shared (`workflow.schedule`, `workflow.lend`) in
turns.py. With max_lag 0 the loops are the synchronous run: a replica gets its share of every put as one call, and the
trainer takes groups in issue order in chunks of fixed size, so that a seed fixes every bit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import DeadlineExceeded, DockError, WorkerLost
from mindspeed_asyncflow.workflow.answering import Answering
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.checkpoint import Held
from mindspeed_asyncflow.workflow.clock import in_time, now
from mindspeed_asyncflow.workflow.dock_port import Dock
from mindspeed_asyncflow.workflow.evaluating import Evaluation
from mindspeed_asyncflow.workflow.events import NoEvents
from mindspeed_asyncflow.workflow.feeding import Feeder
from mindspeed_asyncflow.workflow.job import Crew, Hooks, Job
from mindspeed_asyncflow.workflow.recorder import StepRecorder
from mindspeed_asyncflow.workflow.scoring import Scoring
from mindspeed_asyncflow.workflow.training import Save, Training
from mindspeed_asyncflow.workflow.turns import NoTurns, Turns
from mindspeed_asyncflow.workflow.valuing import Valuing
from mindspeed_asyncflow.workflow.weight_sync import WeightSync

CANCEL_AGAIN_S = 1.0
SEAL_S = 2.0  # a pair that does not come back is not waited for longer


class Run:
    """One training run over workers that are started already. Made inside the event loop that it runs in."""

    def __init__(
        self,
        config: Config,
        dock: Dock,
        batches: Callable[[], Sequence[Issue] | None],
        crew: Crew,
        sync: WeightSync,
        recorder: StepRecorder,
        evaluation: Evaluation | None,
        save: Save,
        *,
        turns: Turns | None = None,
        events: NoEvents | None = None,
        outside: Hooks | None = None,
    ) -> None:
        """`batches()` gives the prompts of the next step, None at the end of the data."""
        hooks = outside or Hooks()
        self.config, self.dock = config, dock
        self.over = False  # no loop runs any more
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # raised by `train`
        self.job = Job(config, dock, crew, sync, recorder, turns or NoTurns(), events or NoEvents(), self._spawn)
        self.window, self.book, self.sync = self.job.window, self.job.book, sync
        self.feeder = Feeder(self.job, batches, hooks.ready)
        self.answering = Answering(self.job)
        self.scoring = Scoring(self.job)
        self.valuing = Valuing(self.job)
        stop = self.answering.stop_all
        self.training = Training(self.job, self.feeder, stop, evaluation, save, self.valuing, hooks.permitted)
        if evaluation is not None:
            evaluation.progressed = self.job.progressed

    async def train(self) -> None:
        """Run all loops until the last step is trained or the data ends; raise the first error of any loop."""
        trained = self._spawn(self.training.train_loop())
        loops = [self.feeder.feed_loop(), self.scoring.score_loop(), self.training.publish_loop(), self.watchdog()]
        loops += [self.scoring.reference_loop(i) for i in range(len(self.job.crew.references))]
        loops += [self.valuing.value_loop()] if self.valuing.there else []
        for loop in loops:
            self._spawn(loop)
        self.answering.start()
        try:
            await asyncio.wait([trained, self._failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.over = True
            left = set(self._tasks)
            for task in left:
                task.cancel()
            with contextlib.suppress(DockError, WorkerLost, asyncio.TimeoutError):  # wakes the claims that still wait
                await in_time(self.dock.seal(), SEAL_S)
            while left:
                _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
                for task in left:  # a wait that ended in the same moment may have eaten the first one
                    task.cancel()
            self.training.between.close()
        if self._failed.done():
            self._failed.result()
        self.job.events.note("ended", open=self.book.open_groups())

    def state(self) -> dict[str, Any]:
        """What a run that goes on from here needs of this driver, as JSON values; between two steps."""
        job, book = self.job, self.book
        window = self.window.state()
        # Groups on their way into the dock are in the book, and are put by whoever goes on.
        window["issued"] += (len(book.open_groups()) - book.count()) * book.group_size
        bad = {"trainer": self.training.bad_steps, "critic": self.valuing.bad_steps}
        sync = {"gap_max": job.sync.gap_max, "unmoved": job.sync.unmoved, "share": job.sync.unchanged_share}
        parts = {"book": book.state(), "feeder": self.feeder.state(), "recorder": job.recorder.state()}
        return {"window": window, "bad_steps": bad, "sync": sync} | parts

    async def restore(
        self, state: Mapping[str, Any], issue_of: Callable[[int, int], Issue], held: Mapping[int, Held]
    ) -> None:
        """Go on from `state`, before `train`. `issue_of(epoch, index)` gives a prompt; `held`: what the dock has of the
        groups that are open there, and it has no others. Groups that it has lost are put again."""
        self.window.restore(state["window"])
        self.feeder.restore(state["feeder"], issue_of)
        self.training.bad_steps, self.valuing.bad_steps = state["bad_steps"]["trainer"], state["bad_steps"]["critic"]
        sync = self.job.sync
        sync.gap_max = max(sync.gap_max, state["sync"]["gap_max"])
        sync.unmoved, sync.unchanged_share = state["sync"]["unmoved"], state["sync"]["share"]
        self.job.step = self.window.version
        rows = self.book.restore(state["book"], issue_of)
        if missing := [rows[group] for group in rows if group not in held]:
            await self.dock.put_groups(missing)
        for group, of_group in rows.items():
            found = held.get(group, Held(len(of_group)))
            if fewer := self.book.found(group, found.samples, found.sampled, found.scored):
                self.window.dropped["unscored"] += fewer
                self.job.events.note("dropped", group=group, samples=fewer, reason="unscored")
            self.book.add(self.book.batch_of(group), [of_group])
        scores = [([group, member], score) for group in rows for member, score in held.get(group, Held(0)).scores]
        told = {"rows": [row for row, _ in scores], "scores": [score for _, score in scores]}
        self.job.events.note("restored", open=self.book.open_groups(), **told)

    async def issue_again(self) -> None:
        """A dock pair was started again: prompts whose rows it has not any more are issued again."""
        await self.feeder.issue_again()

    def join(self, index: int, worker: Any) -> None:
        """A replica is up (or up again) and answers from now on."""
        self.answering.join(index, worker)

    async def give_up(self, index: int, error: Exception) -> None:
        """A replica that was expected will not come. Raises `WorkerLost` when nobody else is there or starting."""
        self.answering.failed_to_start(index, error)

    async def lost(self, index: int, error: WorkerLost) -> None:
        """The process of a replica is dead, which nobody may have noticed who waits for something else."""
        await self.answering.lost(index, error)

    async def leave(self, index: int) -> None:
        """A replica goes in order; what it holds is answered by others."""
        await self.answering.leave(index)

    def _spawn(self, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(loop)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def watchdog(self) -> None:
        """No silent hang: without progress for `watchdog_s`, stop and say who waits for whom."""
        job, limit = self.job, self.config.workflow.watchdog_s
        while True:
            await asyncio.sleep(limit / 20)
            if job.crew.starting and (not job.crew.rollouts or self.config.workflow.max_lag == 0):
                job.progressed()  # nobody can answer before a replica is up, which has a deadline of its own
            idle = now() - job.progress_at
            if idle > limit:
                open_groups = ", ".join(f"step {b}: {n} groups" for b, n in job.book.open_batches())
                parts: list[Any] = [job, self.training, self.answering, job.sync, job.turns]
                if self.training.evaluation is not None:
                    parts.append(self.training.evaluation)
                said = [*(part.describe() for part in parts), await self.dock.describe()]
                raise DeadlineExceeded(
                    f"no progress for {idle:.0f} s (workflow.watchdog_s {limit:g}) in step {job.step}; "
                    f"open: {open_groups or 'nothing'}\n" + "\n".join(line for line in said if line)
                )
