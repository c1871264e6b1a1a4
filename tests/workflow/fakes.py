"""Engines without a model, so that the real loops, workers, dock and relay run in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.observe.progress import Progress
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.observe.writers import MetricsWriter, SamplesWriter
from mindspeed_asyncflow.records import Completion, OptimReport, SamplingSpec, UpdateReport, VersionSpan
from mindspeed_asyncflow.reshard.relay import RelayReader, WholeWriter
from mindspeed_asyncflow.rewards.pool import Score
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.recorder import StepRecorder
from mindspeed_asyncflow.workflow.run import Run
from mindspeed_asyncflow.workflow.train_worker import TrainWorker
from mindspeed_asyncflow.workflow.weight_sync import WeightSync
from mindspeed_asyncflow.workflow.workers import RolloutWorker, ScoreWorker

QUIET = Tracer("", "test", enabled=False)


class FakeRollout:
    """Answers [prompt's first id, version + 10]; the log-probability is minus the version that sampled."""

    def __init__(self, delay_s: float = 0.0, fail_after: int | None = None, silent_s: float = 0.0) -> None:
        self.version, self.delay_s, self.fail_after, self.silent_s = 0, delay_s, fail_after, silent_s
        self.answered = 0
        self.batch_versions: list[int] = []
        self.stale_answers = 0  # so many of the next answers pretend that their first token came from version 0

    def generate(self, requests, timeout_s):
        self.batch_versions.append(self.version)
        time.sleep(self.silent_s)
        for request in requests:
            if self.fail_after is not None and self.answered >= self.fail_after:
                raise RuntimeError("the engine broke")
            time.sleep(self.delay_s / len(requests))
            self.answered += 1
            oldest = 0 if self.stale_answers > 0 else self.version
            self.stale_answers -= 1
            yield Completion(
                request.request_id,
                np.array([request.prompt_ids[0], self.version + 10], np.int32),
                np.full(2, -float(self.version), np.float32),
                "stop",
                (VersionSpan(oldest, 0, 1), VersionSpan(self.version, 1, 2)),
            )

    def update(self, manifest):
        self.version = int(next(iter(RelayReader(manifest)))[1][0])
        return UpdateReport(manifest.version, 0.0, manifest.fingerprint)

    def score(self, sequences):
        return [np.full(len(answer), -float(self.version), np.float32) for _, answer in sequences]

    def close(self):
        pass


class FakeTrain:
    """Its one weight is its version; remembers which rows it saw in which step."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.version, self.delay_s = 0, delay_s
        self.rows: list[list[int]] = [[]]
        self.seen_versions: list[list[int]] = [[]]
        self.denominators: list[float] = []
        self.bad_steps: set[int] = set()

    def forward_backward(self, micro_batches):
        time.sleep(self.delay_s)
        for batch in micro_batches:
            self.rows[-1] += [int(r) for r in batch.rows if r >= 0]
            self.seen_versions[-1] += [int(-v) for v in batch.rollout_logprobs[batch.loss_mask > 0]]
        tokens = sum(b.num_valid_tokens for b in micro_batches)
        return {"actor/tokens_count": tokens}

    def optim_step(self, denominator):
        self.denominators.append(denominator)
        applied = self.version not in self.bad_steps
        self.version += 1
        self.rows.append([])
        self.seen_versions.append([])
        return OptimReport(applied, 1.0 if applied else float("nan"), 0.1, "" if applied else "layer.weight")

    def logprobs(self, micro_batches, temperature=None):
        return [np.full(len(b.targets), -float(self.version), np.float32) * b.loss_mask for b in micro_batches]

    def export_weights(self):
        yield "w", torch.full((4,), float(self.version))

    def close(self):
        pass


class FakePool:
    """The sum of the answer is the score; `silent_truths` get none."""

    def __init__(self) -> None:
        self.silent_truths: set[str] = set()

    def score(self, texts, truths, finished):
        return [
            Score(None, "the scorer abstained") if t in self.silent_truths else Score(float(x), "")
            for x, t in zip(texts, truths)
        ]

    def close(self):
        pass


class Local:
    """A worker of this process whose methods can be awaited."""

    def __init__(self, worker) -> None:
        self._worker, self._lock = worker, threading.Lock()

    def __getattr__(self, method):
        def locked(*args):
            with self._lock:
                return getattr(self._worker, method)(*args)

        async def call(*args):
            return await asyncio.to_thread(locked, *args)

        return call


@dataclass
class Outcome:
    run: Run
    recorder: StepRecorder
    train: FakeTrain
    rollouts: list[FakeRollout]
    dock_used_bytes: int
    saved: list[int] = field(default_factory=list)


def prompts_of(count: int, batch: int, epochs: int = 1000, drop_last: bool = True):
    """A data stream as the loops see it: batches of issues, then None."""

    def stream():
        for epoch in range(epochs):
            for start in range(0, count, batch):
                part = range(start, min(start + batch, count))
                if len(part) == batch or not drop_last:
                    yield [Issue(epoch, i, np.array([i, 1], np.int32), str(i)) for i in part]

    batches = stream()
    return lambda: next(batches, None)


def run_loops(config: Config, tmp_path, batches, *, rollouts=None, train=None, pool=None, before=None) -> Outcome:
    """Run the real loops over fake engines to their end (or error)."""
    rollouts = rollouts or [FakeRollout() for _ in range(config.rollout.replicas)]
    train, pool = train or FakeTrain(), pool or FakePool()
    secret = secrets.token_bytes(8)
    relay = WholeWriter(f"/dev/shm/asyncflow-{os.getpid()}-test{secrets.token_hex(4)}")
    server = DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=4, lease_s=30.0, secret=secret).start()
    stack = contextlib.ExitStack()
    stack.callback(server.close)
    stack.callback(relay.close)

    def client() -> DockClient:
        made = DockClient(server.address, secret, 5.0)
        stack.callback(made.close)
        return made

    folder = RunFolder.create(tmp_path, "loops", "")
    recorder = StepRecorder(
        config,
        MetricsWriter(folder, tensorboard=False),
        SamplesWriter(folder),
        Progress(config.trainer.steps, io.StringIO()),
        lambda ids: " ".join(str(int(i)) for i in ids),
    )
    sampling = SamplingSpec(config.rollout.max_new_tokens)
    remote_rollouts = [
        Local(
            RolloutWorker(
                engine, client(), sampling, name=f"rollout{i}", seed=0, commit_groups=1, timeout_s=5.0, tracer=QUIET
            )
        )
        for i, engine in enumerate(rollouts)
    ]
    scorer = Local(
        ScoreWorker(
            pool,
            client(),
            lambda answers: [str(float(np.sum(a))) for a in answers],
            config.algorithm,
            name="scorer",
            tracer=QUIET,
        )
    )
    trainer = Local(
        TrainWorker(train, client(), config.algorithm, name="trainer0", replica=0, relay=relay, tracer=QUIET)
    )
    sync = WeightSync(remote_rollouts, "float32")
    sync.probe = [(np.array([1], np.int32), np.array([2, 3], np.int32))]
    outcome_saved: list[int] = []

    async def save(step):
        outcome_saved.append(step)

    async def nothing():
        return None

    async def main() -> Run:
        first = await trainer.start(0, sync.probe)
        sync.publish(first.manifest, first.probe)
        run = Run(config, client(), batches, remote_rollouts, scorer, [], [trainer], [0], sync, recorder, nothing, save)
        if before is not None:
            before(run)
        await run.train()
        return run

    with stack:
        run = asyncio.run(main())
        recorder.end()
        used = client().stats()["used_bytes"]
    return Outcome(run, recorder, train, rollouts, used, outcome_saved)
