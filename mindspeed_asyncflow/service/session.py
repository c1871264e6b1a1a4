"""One run: start its processes (starting.py), run the loops over them, end them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from mindspeed_asyncflow.config.feasibility import own_replicas
from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.service import wiring
from mindspeed_asyncflow.service.starting import Starting
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.job import Crew
from mindspeed_asyncflow.workflow.run import Run
from mindspeed_asyncflow.workflow.weight_sync import expected_of


class Session(Starting):
    # ---- the run -----------------------------------------------------------------------------------------------------

    async def prepare(self, say: Callable[[str], None]) -> None:
        """Version 0: probe answers, the first publication, loaded and checked by all replicas, the first evaluation."""
        say("checking weights of trainer and rollout")
        if self._probe is None:
            self._probe = await self._choose_probe(self.rollouts[min(self.replicas.up)])
        self.sync.probe = self._probe
        starting = asyncio.gather(*(t.start(0, self.sync.probe) for t in self.trainers))
        await self.within(starting, "the trainer ranks to begin")
        expected = expected_of(self.trainers)
        await self.within(asyncio.wait([expected]), "the trainer ranks to score the probe answers")
        writing = asyncio.gather(*(t.published(0) for t in self.trainers))
        shards = await self.within(writing, "the trainer ranks to publish the starting weights")
        self.sync.publish(shards, expected)
        await self.bring_all_up()
        if self.config.evaluation.prompts and self.prompts.heldout:
            say("evaluating held-out prompts")
            await self.evaluate()

    async def train(self) -> None:
        assert self.dock is not None
        late = [i for i in self.replicas.remotes if i not in self.rollouts]
        workers = (dict(self.rollouts), self.scorer, self.references, self.trainers)
        crew = Crew(*workers, wiring.leaders(self.config), set(late), self._end, self.critics)
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
        )
        for index in late:
            self.run.job.spawn(self._join_late(index))
        self.recorder.begin()
        try:
            await self.run.train()
        finally:
            self.recorder.end()

    def _next_batch(self) -> list[Issue] | None:
        batch = next(self.stream, None)
        return None if batch is None else [Issue(epoch, index, p.ids, p.truth, p.fields) for epoch, index, p in batch]

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
                if not self.rollouts or set(self.rollouts) == there:
                    raise
                get_logger("service").warning("the others go on: %s", error)

    async def evaluate(self) -> None:
        """Measure the newest version; nothing is done where there is nothing to ask."""
        assert self.evaluation is not None, "evaluation follows start"
        await self.evaluation.between()

    async def save(self, step: int) -> None:
        """Trainer state and the policy as a Hugging Face folder."""
        folder = self.folder.checkpoints / f"step_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        extra = {"step": step, "data": self.stream.state(), "seed": self.config.run.seed}
        async with self.turns.training():
            saving = asyncio.gather(*(t.save(str(folder), extra) for t in [*self.trainers, *self.critics]))
            await self.within(saving, "the trainer and critic ranks to save")
        self.folder.point_hf(folder / "hf")

    @property
    def version(self) -> int:
        """Newest published policy version."""
        return self.sync.newest.version if self.sync.newest is not None else 0

    async def close(self) -> None:
        self.replicas.close()
        for task in self._watching:
            task.cancel()
        await super().close()
        if self.dock is not None:
            self.dock.close()
            self.dock.client.close()
