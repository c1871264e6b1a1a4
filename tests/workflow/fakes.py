"""Engines without a model, so that the real loops, workers, dock and relay run in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from mindspeed_asyncflow.config.model import FullTensor
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.observe.progress import Progress
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.observe.writers import EvaluationsWriter, MetricsWriter, SamplesWriter
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.records import Completion, OptimReport, SamplingSpec, UpdateReport, VersionSpan
from mindspeed_asyncflow.reshard.boxes import whole
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment
from mindspeed_asyncflow.reshard.relay import RelayReader, RelayWriter
from mindspeed_asyncflow.reshard.relay_plan import write_plan
from mindspeed_asyncflow.reshard.relay_server import RelayServer
from mindspeed_asyncflow.rewards.pool import Score
from mindspeed_asyncflow.workflow.arrivals import Mirror
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.checkpoint import settle
from mindspeed_asyncflow.workflow.critic_worker import CriticWorker
from mindspeed_asyncflow.workflow.dock_port import ThreadDock
from mindspeed_asyncflow.workflow.evaluating import Evaluation
from mindspeed_asyncflow.workflow.events import NoEvents
from mindspeed_asyncflow.workflow.job import Crew
from mindspeed_asyncflow.workflow.publisher import Publisher
from mindspeed_asyncflow.workflow.recorder import StepRecorder
from mindspeed_asyncflow.workflow.run import Run
from mindspeed_asyncflow.workflow.score_worker import ScoreWorker
from mindspeed_asyncflow.workflow.train_worker import TrainWorker
from mindspeed_asyncflow.workflow.turns import NoTurns
from mindspeed_asyncflow.workflow.weight_sync import WeightSync, expected_of
from mindspeed_asyncflow.workflow.workers import MirrorRoute, RolloutWorker

QUIET = Tracer("", "test", enabled=False)


class FakeRollout:
    """Answers [prompt's first id, version + 10]; a log-probability is minus the version that sampled the token.

    The first token of a batch is sampled when the batch begins, the second one when its answer is complete, so an
    update in between leaves its trace. `lies`: fingerprint that is reported instead of the served one.
    """

    def __init__(
        self, delay_s: float = 0.0, fail_after: int | None = None, silent_s: float = 0.0, load_s: float = 0.0
    ) -> None:
        self.version, self.delay_s, self.fail_after, self.silent_s = 0, delay_s, fail_after, silent_s
        self.load_s, self.fingerprint, self.lies = load_s, "", ""
        self.answered = 0
        self.batch_versions: list[int] = []
        self.loads: list[tuple[int, float, float]] = []  # version, begin, end
        self.answers_at: list[float] = []
        self.stale_answers = 0  # so many of the next answers pretend that their first token came from version 0

    def generate(self, requests, timeout_s, stream=None):
        first = self.version
        self.batch_versions.append(first)
        time.sleep(self.silent_s)
        for request in requests:
            if self.fail_after is not None and self.answered >= self.fail_after:
                raise RuntimeError("the engine broke")
            time.sleep(self.delay_s / len(requests))
            self.answered += 1
            self.answers_at.append(time.perf_counter())
            oldest = 0 if self.stale_answers > 0 else first
            self.stale_answers -= 1
            now, fingerprint = self.version, self.fingerprint
            yield Completion(
                request.request_id,
                np.array([request.prompt_ids[0], now + 10], np.int32),
                -np.array([first, now], np.float32),
                "stop",
                (VersionSpan(oldest, 0, 1), VersionSpan(now, 1, 2)),
                fingerprint=self.lies or fingerprint,
            )

    def update(self, manifest):
        began = time.perf_counter()
        reader = RelayReader(manifest)
        time.sleep(self.load_s)
        weights = next(iter(reader))[1].clone()
        reader.check()
        assert (weights == manifest.version).all(), "half of another version"
        self.version, self.fingerprint = manifest.version, manifest.fingerprint
        self.loads.append((manifest.version, began, time.perf_counter()))
        return UpdateReport(manifest.version, time.perf_counter() - began, manifest.fingerprint)

    def score(self, sequences):
        return [np.full(len(answer), -float(self.version), np.float32) for _, answer in sequences]

    def close(self):
        pass


class FakeTrain:
    """Its one weight is full of its version, changed in place; remembers which rows it saw in which step."""

    def __init__(self, delay_s: float = 0.0, weights: int = 4, probe_s: float = 0.0) -> None:
        self.version, self.delay_s, self.probe_s = 0, delay_s, probe_s
        self.weight = torch.zeros(weights)
        tensor = FullTensor("w", (weights,), 0)
        self.layout = Layout({"w": tensor}, ((LocalParam("w", (weights,), (Segment("w", whole((weights,))),)),),))
        self.rows: list[list[int]] = [[]]
        self.seen_versions: list[list[int]] = [[]]
        self.denominators: list[float] = []
        self.bad_steps: set[int] = set()
        self.frozen = False  # steps change nothing

    def forward_backward(self, micro_batches):
        time.sleep(self.delay_s)
        for batch in micro_batches:
            self.rows[-1] += [int(r) for r in batch.rows if r >= 0]
            self.seen_versions[-1] += [int(-v) for v in batch.rollout_logprobs[batch.loss_mask > 0]]
        tokens = sum(b.num_valid_tokens for b in micro_batches)
        sequences = sum(len(np.unique(b.sample_index[b.loss_mask > 0])) for b in micro_batches)
        return {
            "actor/tokens_count": tokens,
            "actor/loss_tokens_count": tokens,
            "actor/loss_sequences_count": sequences,
        }

    def optim_step(self, denominator):
        self.denominators.append(denominator)
        applied = self.version not in self.bad_steps
        self.version += 1
        if not self.frozen:
            self.weight.fill_(float(self.version))
        self.rows.append([])
        self.seen_versions.append([])
        return OptimReport(applied, 1.0 if applied else float("nan"), 0.1, "" if applied else "layer.weight")

    def logprobs(self, micro_batches, temperature=None):
        time.sleep(self.probe_s)
        return [np.full(len(b.targets), -float(self.version), np.float32) * b.loss_mask for b in micro_batches]

    def shards(self):
        return {"w": self.weight}

    def close(self):
        pass


class SlowRelay(RelayWriter):
    """A relay that reads the weights `delay_s` after it was asked to write them; `changed` if they changed by then."""

    delay_s = 0.0
    changed = 0

    def publish(self, version, tensors):
        boxes = list(tensors)
        asked = [tensor.clone() for *_, tensor in boxes]
        time.sleep(self.delay_s)
        checksums = super().publish(version, boxes)
        self.changed += not all(torch.equal(before, tensor) for before, (*_, tensor) in zip(asked, boxes))
        return checksums


class FakePool:
    """The sum of the answer is the score; `silent_truths` get none."""

    def __init__(self) -> None:
        self.silent_truths: set[str] = set()

    def score(self, answers):
        return [
            Score(None, "the scorer abstained") if a.truth in self.silent_truths else Score(float(a.text), "")
            for a in answers
        ]

    def close(self):
        pass


class Local:
    """A worker of this process whose methods can be awaited, one at a time except those that run `aside`.

    After `kill` it answers nobody any more, as a process that has died.
    """

    def __init__(self, worker, aside=()) -> None:
        self.worker, self._aside, self._lock = worker, aside, threading.Lock()
        self._dead = asyncio.Event()

    def kill(self) -> None:
        self._dead.set()
        if hasattr(self.worker, "engine"):
            self.worker.engine.close()

    def __getattr__(self, method):
        lock = contextlib.nullcontext() if method in self._aside else self._lock

        def locked(*args):
            with lock:
                return getattr(self.worker, method)(*args)

        async def call(*args):
            dead = asyncio.ensure_future(self._dead.wait())
            work = asyncio.ensure_future(asyncio.to_thread(locked, *args))
            await asyncio.wait([dead, work], return_when=asyncio.FIRST_COMPLETED)
            if self._dead.is_set():
                work.add_done_callback(lambda done: done.cancelled() or done.exception())
                raise WorkerLost("the process died")
            dead.cancel()
            return work.result()

        return call


class Notes(NoEvents):
    """All events of a run, as (kind, fields)."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict]] = []

    def note(self, kind, **fields):
        self.all.append((kind, fields))

    def of(self, kind):
        return [fields for noted, fields in self.all if noted == kind]

    def trained(self):
        """By step: (epoch, prompt) of each trained group, in order, of groups that this process issued."""
        prompts = {g: tuple(p) for note in self.of("issued") for g, p in zip(note["groups"], note["prompts"])}
        steps: dict[int, list] = {}
        for note in self.of("trained"):
            groups = dict.fromkeys(group for group, _ in note["groups"].values())
            steps.setdefault(note["step"], []).extend(prompts.get(group, group) for group in groups)
        return steps


@dataclass
class Cut:
    """What a checkpoint of `run_loops` holds."""

    state: dict  # of the driver, as JSON gives it back
    dock: Path
    given: int  # batches that the data stream gave


@dataclass
class Outcome:
    run: Run
    recorder: StepRecorder
    train: FakeTrain
    rollouts: list[FakeRollout]
    dock_used_bytes: int
    saved: dict[int, Cut] = field(default_factory=dict)  # by step; the last one too
    notes: Notes = field(default_factory=Notes)
    folder: RunFolder | None = None
    changed_while_written: int = 0  # versions


def prompts_of(count: int, batch: int, epochs: int = 1000, drop_last: bool = True):
    """A data stream as the loops see it: batches of issues, then None."""

    def stream():
        for epoch in range(epochs):
            for start in range(0, count, batch):
                part = range(start, min(start + batch, count))
                if len(part) == batch or not drop_last:
                    yield [issue_of(epoch, i) for i in part]

    batches = stream()
    return lambda: next(batches, None)


def issue_of(epoch, index):
    return Issue(epoch, index, np.array([index, 1], np.int32), str(index))


def run_loops(
    config: Config,
    tmp_path,
    batches,
    *,
    rollouts=None,
    train=None,
    pool=None,
    before=None,
    publish_s=0.0,
    link=None,
    late=(),
    critics=(),
    heldout=(),
    resume: Cut | None = None,
    pairs=1,
) -> Outcome:
    """Run the real loops over fake engines to their end (or error).

    `late`: indices of replicas that `before(run)` is to join: `run.join(i, run.late[i])`.

    `critics`: engines of critic ranks, which `algorithm.advantage` gae needs.

    `heldout`: prompts of an evaluation before the run, during it as `config.evaluation` says, and after it.

    `resume`: go on from there; `batches` begins with the first one all the same. `pairs`: of the dock.

    `link`: bytes per second between the trainer's node and the one of all replicas; None: they are on one node.
    """
    rollouts = rollouts or [FakeRollout() for _ in range(config.rollout.replicas)]
    train, pool = train or FakeTrain(), pool or FakePool()
    secret = secrets.token_bytes(8)
    plan = write_plan(train.layout)
    path = f"/dev/shm/asyncflow-{os.getpid()}-test{secrets.token_hex(4)}"
    relay = SlowRelay(path, plan.table(train.layout, "float32"), keep=config.workflow.keep_versions)
    relay.delay_s = publish_s
    by_client = config.service.prompts == "client"
    tasks = grpo_tasks(False, token_level=config.algorithm.token_level, critic=bool(critics), service=by_client)
    stack = contextlib.ExitStack()
    servers = [
        DockServer(GRPO_COLUMNS, tasks, arena_mb=4, lease_s=30.0, secret=secret, pair=pair).start()
        for pair in range(pairs)
    ]
    for server in servers:
        stack.callback(server.close)
    stack.callback(lambda: publisher.close())

    def client() -> DockClient:
        made = DockClient([server.address for server in servers], secret, 5.0)
        stack.callback(made.close)
        return made

    folder = RunFolder.create(tmp_path, "loops", "")
    recorder = StepRecorder(
        config,
        MetricsWriter(folder),
        SamplesWriter(folder),
        Progress(config.trainer.steps, io.StringIO()),
        lambda ids: " ".join(str(int(i)) for i in ids),
    )
    sampling = SamplingSpec(config.rollout.max_new_tokens)
    aside = ("generate", "load", "score") if config.workflow.update == "in_flight" else ()
    aside = (*aside, "generate") if config.workflow.repack_below else aside
    remote_rollouts = [
        Local(
            RolloutWorker(
                engine,
                client(),
                sampling,
                name=f"rollout{i}",
                seed=0,
                commit_groups=1,
                timeout_s=5.0,
                tracer=QUIET,
                partial_rounds=config.workflow.partial_rounds,
                group_size=config.algorithm.group_size,
                stream_out_s=config.faults.stream_out_s if config.workflow.max_lag else None,
            ),
            aside=(*aside, "fetch", "stop", "running", "answer"),
        )
        for i, engine in enumerate(rollouts)
    ]
    scorer = Local(
        ScoreWorker(
            pool,
            client(),
            lambda answers: [str(float(np.sum(a))) for a in answers],
            config,
            name="scorer",
            tracer=QUIET,
        )
    )
    publisher = Publisher(
        train.shards,
        plan.ranks[0],
        relay,
        platform=CpuPlatform(),
        device=torch.device("cpu"),
        name="trainer0",
        timeout_s=5.0,
        tracer=QUIET,
    )
    trainer = Local(
        TrainWorker(train, client(), config.algorithm, name="trainer0", replica=0, publisher=publisher, tracer=QUIET),
        aside=("published",),
    )
    remote_critics = [
        Local(
            CriticWorker(engine, client(), config.algorithm, name=f"critic{i}", replica=0, leads=i == 0, tracer=QUIET)
        )
        for i, engine in enumerate(critics)
    ]
    mirrors = []
    if link is not None:
        relay_server = RelayServer(path, secret, bytes_per_s=link)
        stack.callback(relay_server.close)
        first = remote_rollouts[0]
        stack.callback(lambda: first.worker.mirror[0].close())
        first.worker.use_mirror(
            MirrorRoute(f"{path}-mirror", (relay_server.address,), secret, config.workflow.keep_versions, 5.0, False)
        )
        mirrors = [Mirror("b", tuple(range(len(rollouts))), first.fetch)]
    sync = WeightSync(
        [None if i in late else worker for i, worker in enumerate(remote_rollouts)],
        "float32",
        path,
        relay.table.text,
        update=config.workflow.update,
        keep=config.workflow.keep_versions,
        mirrors=mirrors,
        busy=recorder.busy,
    )
    sync.probe = [(np.array([1], np.int32), np.array([2, 3], np.int32))]
    saved: dict[int, Cut] = {}
    notes = Notes()
    current: list[Run] = []
    given = 0

    def counted():
        nonlocal given
        given += 1
        return batches()

    async def save(step, last=False):
        dock = folder.path / f"cut{step}{'-last' * last}"
        await asyncio.to_thread(client().snapshot, dock)
        saved[step] = Cut(json.loads(json.dumps(current[0].state())), dock, given)

    async def restore(run):
        cut = client()
        await asyncio.to_thread(cut.restore, resume.dock)
        held = await asyncio.to_thread(settle, cut, "train", {g for g, *_ in resume.state["book"]["groups"]})
        for _ in range(resume.given):
            counted()
        recorder.restore(resume.state["recorder"])
        await run.restore(resume.state, issue_of, held)

    async def main() -> Run:
        first = resume.state["window"]["version"] if resume else 0
        train.version = first
        train.weight.fill_(float(first))
        await trainer.start(first, sync.probe)
        sync.publish([await trainer.published(first)], expected_of([trainer]))
        await sync.bring_all_up()
        evaluation = Evaluation(config, heldout, sync, NoTurns(), scorer, recorder, EvaluationsWriter(folder))
        if not resume:
            await evaluation.between()
        there = {i: worker for i, worker in enumerate(remote_rollouts) if i not in late}
        crew = Crew(there, scorer, [], [trainer], [0], starting=set(late), critics=remote_critics)
        dock = ThreadDock(client(), "train", len(rollouts))
        run = Run(config, dock, counted, crew, sync, recorder, evaluation, save, events=notes)
        current.append(run)
        run.late = {i: remote_rollouts[i] for i in late}
        if resume:
            await restore(run)
        if before is not None:
            before(run)
        await run.train()
        recorder.end()
        await sync.bring_all_up()
        await evaluation.between()
        return run

    with stack:
        run = asyncio.run(main())
        used = client().stats()["used_bytes"]
    return Outcome(run, recorder, train, rollouts, used, saved, notes, folder, relay.changed)
