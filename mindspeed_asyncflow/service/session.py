"""The processes of one run: start them all, run the loops over them, end them all."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.data.prompts import Prompt, PromptSet, PromptStream
from mindspeed_asyncflow.data.tokenizers import stop_token_ids
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.errors import DeadlineExceeded
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service import wiring
from mindspeed_asyncflow.service.actors import Remote, here, spawn
from mindspeed_asyncflow.service.cleanup import shm_path
from mindspeed_asyncflow.service.placement import DEVICE
from mindspeed_asyncflow.service.relays import Place, Relays, over_loopback, plan_relays
from mindspeed_asyncflow.workflow.arrivals import Mirror
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.recorder import StepRecorder
from mindspeed_asyncflow.workflow.run import Run
from mindspeed_asyncflow.workflow.weight_sync import WeightSync, expected_of
from mindspeed_asyncflow.workflow.workers import MirrorRoute

T = TypeVar("T")
CLOSE_S = 5.0  # workers get this long to close in order before they are killed


class Session:
    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        model_folder: str,
        tokenizer,
        prompts: PromptSet,
        recorder: StepRecorder,
    ) -> None:
        self.config, self.folder, self.model_folder = config, folder, model_folder
        self.stop_ids = stop_token_ids(model_folder, tokenizer)
        self.prompts, self.recorder = prompts, recorder
        self.stream = PromptStream(
            prompts, config.run.seed, config.data.epochs, config.data.drop_last, config.workflow.groups_per_step
        )
        self.workers: list[Remote] = []
        self.dock: DockClient | None = None
        self.run: Run | None = None

    async def start(self, say: Callable[[str], None]) -> None:
        """Start every worker at the same time; an error names the ones that did not come up."""
        config, secret = self.config, secrets.token_bytes(16)
        say("starting dock")
        pairs = [self._spawn(f"dock{i}") for i in range(config.dock.pairs)]
        self._spawn_workers()
        await self._find_places()
        addresses = await self._start_dock(pairs, secret)
        self.dock = DockClient(addresses, secret, config.dock.wait_s)
        spec = wiring.WorkerSpec(
            config, self.model_folder, self.stop_ids, addresses, secret, str(self.folder.trace), str(self.folder.log)
        )
        say(
            f"starting {config.trainer.world_size} trainer rank(s), {config.rollout.replicas} rollout replica(s) "
            f"({config.rollout.engine}), scorer"
        )
        relays = self._plan_relays()
        host = self.places["trainer0"].ip
        await self._in_time({"trainer0": self.trainers[0].build(wiring.hold_rendezvous_port, host)})
        master = host, await self._within(self.trainers[0].get("port"), "trainer0 to name its port")
        starting = {f"rollout{i}": w.build(wiring.build_rollout, spec, i) for i, w in enumerate(self.rollouts)}
        starting |= {
            f"trainer{r}": w.build(wiring.build_trainer, spec, r, master, relays.ranks[r])
            for r, w in enumerate(self.trainers)
        }
        starting |= {f"reference{i}": w.build(wiring.build_reference, spec, i) for i, w in enumerate(self.references)}
        starting["scorer"] = self.scorer.build(wiring.build_scorer, spec)
        await self._in_time(starting)
        table = await self._within(self.trainers[0].table(), "trainer0 to describe the relay")
        self.sync = WeightSync(
            self.rollouts,
            config.model.dtype,
            relays.ranks[0].path,
            table,
            update=config.workflow.update,
            keep=config.workflow.keep_versions,
            mirrors=await self._start_mirrors(relays),
            busy=self.recorder.busy,
        )

    def _spawn_workers(self) -> None:
        config = self.config
        self.trainers = [
            self._spawn(f"trainer{r}", {DEVICE: 1}, aside=("published",)) for r in range(config.trainer.world_size)
        ]
        self.rollouts = [
            self._spawn(f"rollout{i}", {DEVICE: config.rollout.tensor_parallel}, concurrency=4)
            for i in range(config.rollout.replicas)
        ]
        self.references = [self._spawn("reference0")] if config.algorithm.kl_coef > 0 else []
        self.scorer = self._spawn("scorer", concurrency=2)

    async def _find_places(self) -> None:
        """Where every worker runs, by name, and the driver."""
        found = {"driver": Place(*here())}

        async def ask(worker: Remote) -> None:
            found[worker.name] = Place(*await worker.where())

        await self._in_time({worker.name: ask(worker) for worker in self.workers})
        self.places = over_loopback(found)

    def _plan_relays(self) -> Relays:
        trainers, replicas = ([self.places[w.name] for w in workers] for workers in (self.trainers, self.rollouts))
        return plan_relays(trainers, replicas, always_mirror=self.config.workflow.relay == "mirror")

    async def _start_mirrors(self, relays: Relays) -> list[Mirror]:
        """Relay servers beside the trainer ranks, and a mirror in the first replica of every node that needs one."""
        secret, workflow = secrets.token_bytes(16), self.config.workflow
        serving = asyncio.gather(*(self.trainers[rank].serve(ip, secret) for rank, ip in relays.servers.items()))
        sources = tuple(await self._within(serving, "the trainer ranks to serve the relay"))
        silence_s = workflow.watchdog_s / 2  # says more than the watchdog, so it comes first
        mirrors = []
        for at in relays.mirrors:
            first = self.rollouts[at.replicas[0]]
            route = MirrorRoute(at.path, sources, secret, workflow.keep_versions, silence_s, workflow.relay_delta)
            await self._within(first.use_mirror(route), f"rollout{at.replicas[0]} to take the mirror of {at.ip}")
            mirrors.append(Mirror(at.ip, at.replicas, first.fetch))
        return mirrors

    async def _start_dock(self, pairs: list[Remote], secret: bytes) -> list[str]:
        """Addresses of the pairs, also left in the run folder for `asyncflow dock`."""
        starting = {}
        for i, pair in enumerate(pairs):
            host = self.places[pair.name].ip
            starting[pair.name] = pair.build(wiring.build_pair, self.config, secret, i, shm_path(f"arena{i}"), host)
        await self._in_time(starting)
        found = [await self._within(pair.get("address"), f"{pair.name} to name its address") for pair in pairs]
        self.folder.dock.touch(mode=0o600)
        self.folder.dock.write_text(json.dumps({"addresses": found, "secret": secret.hex()}), encoding="utf-8")
        return found

    def _spawn(self, name: str, resources: dict[str, float] | None = None, **threads: Any) -> Remote:
        worker = spawn(name, resources=resources or {}, **threads)
        self.workers.append(worker)
        return worker

    async def _in_time(self, starting: dict) -> None:
        """First failure wins; a deadline names who is missing."""
        tasks = {asyncio.ensure_future(c): name for name, c in starting.items()}
        limit = self.config.workflow.start_timeout_s
        done, waiting = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if waiting:
            missing = ", ".join(sorted(tasks[t] for t in waiting))
            raise DeadlineExceeded(f"not started after {limit:g} s (workflow.start_timeout_s): {missing}")

    async def _within(self, work: Awaitable[T], whom: str) -> T:
        """Work outside the loops, which the watchdog does not see; the deadline is that of the start."""
        limit = self.config.workflow.start_timeout_s
        try:
            return await asyncio.wait_for(work, limit)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"waited {limit:g} s (workflow.start_timeout_s) for {whom}") from None

    async def bring_all_up(self) -> None:
        await self._within(self.sync.bring_all_up(), "the replicas to load the newest weights")

    async def prepare(self, say: Callable[[str], None]) -> None:
        """Version 0: probe answers, the first publication, loaded and checked by all replicas, the first evaluation."""
        say("checking weights of trainer and rollout")
        await self._choose_probe()
        starting = asyncio.gather(*(t.start(0, self.sync.probe) for t in self.trainers))
        await self._within(starting, "the trainer ranks to begin")
        expected = expected_of(self.trainers)
        writing = asyncio.gather(*(t.published(0) for t in self.trainers))
        shards = await self._within(writing, "the trainer ranks to publish the starting weights")
        self.sync.publish(shards, expected)
        await self.bring_all_up()
        if self.config.evaluation.prompts and self.prompts.heldout:
            say("evaluating held-out prompts")
            self.recorder.evaluated(0, await self.evaluate())

    async def _choose_probe(self) -> None:
        """Answers of the starting policy to a few prompts: fixed for the run."""
        count = self.config.workflow.probe_answers
        if not count:
            return
        chosen = (self.prompts.heldout or self.prompts.train)[:count]
        asked = self.rollouts[0].answer([p.ids for p in chosen], False)
        answers = await self._within(asked, "rollout0 to answer the probe prompts")
        self.sync.probe = [(p.ids, ids) for p, (ids, _) in zip(chosen, answers) if len(ids)]

    async def train(self) -> None:
        assert self.dock is not None
        self.run = Run(
            self.config,
            self.dock,
            self._next_batch,
            self.rollouts,
            self.scorer,
            self.references,
            self.trainers,
            wiring.leaders(self.config),
            self.sync,
            self.recorder,
            self.evaluate,
            self.save,
        )
        self.recorder.begin()
        try:
            await self.run.train()
        finally:
            self.recorder.end()

    def _next_batch(self) -> list[Issue] | None:
        batch = next(self.stream, None)
        return None if batch is None else [Issue(epoch, index, p.ids, p.truth) for epoch, index, p in batch]

    async def evaluate(self) -> float | None:
        """Mean score of greedy answers to held-out prompts, spread over the replicas; unscored answers count 0."""
        chosen: list[Prompt] = self.prompts.heldout[: self.config.evaluation.prompts]
        if not chosen:
            return None
        await self.bring_all_up()
        shares = np.array_split(np.arange(len(chosen)), len(self.rollouts))
        asked = asyncio.gather(
            *(w.answer([chosen[i].ids for i in share], True) for w, share in zip(self.rollouts, shares) if len(share))
        )
        answers = await self._within(asked, "the replicas to answer the held-out prompts")
        flat = [a for part in answers for a in part]
        scoring = self.scorer.score_texts(
            [ids for ids, _ in flat], [p.truth for p in chosen], [reason == "stop" for _, reason in flat]
        )
        scores = await self._within(scoring, "the scorer to score the held-out answers")
        return float(np.mean([0.0 if s is None else s for s in scores]))

    async def save(self, step: int) -> None:
        """Trainer state and the policy as a Hugging Face folder."""
        folder = self.folder.checkpoints / f"step_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        extra = {"step": step, "data": self.stream.state(), "seed": self.config.run.seed}
        saving = asyncio.gather(*(t.save(str(folder), extra) for t in self.trainers))
        await self._within(saving, "the trainer ranks to save")
        link(folder / "hf", self.folder.hf)

    @property
    def version(self) -> int:
        """Newest published policy version."""
        return self.sync.newest.version if self.sync.newest is not None else 0

    async def close(self) -> None:
        """Ask every worker to close; `kill` ends those that do not."""
        assert self.dock is not None
        closing = [asyncio.ensure_future(w.close()) for w in reversed(self.workers)]
        _, late = await asyncio.wait(closing, timeout=CLOSE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        self.dock.close()

    def kill(self) -> None:
        """End the processes of all workers now."""
        self.folder.dock.unlink(missing_ok=True)
        for worker in self.workers:
            worker.kill()


def link(target: Path, name: Path) -> None:
    """Point `name` at `target`, replacing an older link."""
    name.unlink(missing_ok=True)
    name.symlink_to(target.relative_to(name.parent))
