"""One run: start its processes (starting.py), run the loops over them, end them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from mindspeed_asyncflow.config.feasibility import own_replicas
from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.service import wiring
from mindspeed_asyncflow.service.saving import Saving
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.job import Crew, Hooks
from mindspeed_asyncflow.workflow.run import Run
from mindspeed_asyncflow.workflow.weight_sync import expected_of


class Session(Saving):
    # ---- the run -----------------------------------------------------------------------------------------------------

    async def prepare(self, say: Callable[[str], None]) -> None:
        """The first version, 0 or that of a checkpoint: probe answers, publication, loaded and checked by all replicas;
        of a new run also the first evaluation."""
        say("checking weights of trainer and rollout")
        if self._probe is None:
            self._probe = await self._choose_probe(self.rollouts[min(self.replicas.up)])
        self.sync.probe = self._probe
        version = self.resumed.version
        starting = asyncio.gather(*(t.start(version, self.sync.probe) for t in self.trainers))
        await self.within(starting, "the trainer ranks to begin")
        expected = expected_of(self.trainers)
        await self.within(asyncio.wait([expected]), "the trainer ranks to score the probe answers")
        writing = asyncio.gather(*(t.published(version) for t in self.trainers))
        shards = await self.within(writing, "the trainer ranks to publish the starting weights")
        self.sync.publish(shards, expected)
        await self.bring_all_up()
        if self.resumed.state is None and self.config.evaluation.prompts and self.prompts.heldout:
            say("evaluating held-out prompts")
            await self.evaluate()

    async def train(self) -> None:
        assert self.dock is not None
        late = [i for i in self.replicas.remotes if i not in self.rollouts]
        workers = (dict(self.rollouts), self.scorer, self.references, self.trainers)
        crew = Crew(*workers, wiring.leaders(self.config), set(late), self._end, self.critics, self._comes_back)
        self.run = Run(
            self.config,
            self.dock,
            self._next_batch,
            crew,
            self.sync,
            self.recorder,
            self.evaluation,
            self.save,
            turns=self.turns,
            events=self.events,
            outside=self._hooks(),
        )
        if self.resumed.state is not None:
            await self.run.restore(self.resumed.state, self.issue_of, self.resumed.held)
            assert self.evaluation is not None
            self.evaluation.resumed(self.resumed.version, self.run.job.spawn)
        self.run.job.spawn(self.supervision.failure())
        for index in late:
            self.run.job.spawn(self._join_late(index))
        self.recorder.begin()
        try:
            await self.run.train()
        finally:
            self.recorder.end()
        await self.written()

    def _hooks(self) -> Hooks:
        """Where the loops wait for somebody outside."""
        outside = self.outside
        if outside is None:
            return Hooks()
        ready = None if outside.prompts is None else outside.prompts.ready
        return Hooks(ready, None if outside.gate is None else outside.gate.passed)

    def _next_batch(self) -> list[Issue] | None:
        if self.outside is not None and self.outside.stopping:
            return None
        batch = next(self.stream, None)
        return None if batch is None else [self.issue_of(epoch, index) for epoch, index, _ in batch]

    async def bring_all_up(self) -> None:
        """Replicas with devices of their own, or where there are none, those that share them, in their turn, load the
        newest weights; again the others where one is lost."""
        while True:
            there = set(self.rollouts)
            chosen = [i for i in sorted(there) if own_replicas(self.config) == 0 or i not in self.sharing]
            try:
                async with contextlib.AsyncExitStack() as turns:
                    for index in chosen:
                        await turns.enter_async_context(self.turns.generating(index))
                    await self.within(self.sync.bring_all_up(chosen), "the replicas to load the newest weights")
                return
            except WorkerLost as error:
                if not await self.somebody(there):
                    raise
                get_logger("service").warning("the others go on: %s", error)

    async def evaluate(self) -> None:
        """Measure the newest version; nothing is done where there is nothing to ask."""
        assert self.evaluation is not None, "evaluation follows start"
        while True:
            there = set(self.rollouts)
            try:
                await self.evaluation.between()
                return
            except WorkerLost as error:  # no replica was left
                if not await self.somebody(there):
                    raise
                get_logger("service").warning("evaluated again: %s", error)
                await self.bring_all_up()

    @property
    def version(self) -> int:
        """Newest published policy version."""
        return self.sync.newest.version if self.sync.newest is not None else 0

    async def close(self) -> None:
        self.replicas.close()
        for task in [*self._watching, *self._leaving]:
            task.cancel()
        await super().close()
        if self.dock is not None:
            self.dock.close()
            self.dock.client.close()
