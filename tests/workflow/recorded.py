"""A run over engines whose bits depend on every row and on the order in which rows are summed, with its record."""

import asyncio
import contextlib
import json
import os
import secrets

import numpy as np
import torch

from mindspeed_asyncflow.config.model import FullTensor
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, Ragged, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.records import OptimReport
from mindspeed_asyncflow.reshard.boxes import whole
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment
from mindspeed_asyncflow.reshard.relay import RelayWriter, assemble
from mindspeed_asyncflow.reshard.relay_plan import write_plan
from mindspeed_asyncflow.workflow import batcher
from mindspeed_asyncflow.workflow.events import EventLog
from mindspeed_asyncflow.workflow.publisher import Publisher
from mindspeed_asyncflow.workflow.sample_log import SampleLog, file_of
from mindspeed_asyncflow.workflow.train_worker import ChunkRules, TrainWorker
from tests.workflow.fakes import QUIET, FakeTrain, Local

REPLICAS = 2
GROUPS = 4  # of two rows each


def layout():
    """Two tensors, one in each rank."""
    tensors = [FullTensor(f"w{rank}", (4,), 0) for rank in range(REPLICAS)]
    held = tuple((LocalParam(t.name, t.shape, (Segment(t.name, whole(t.shape)),)),) for t in tensors)
    return Layout({t.name: t for t in tensors}, held)


class Summing(FakeTrain):
    """Its weight, one of two, takes in every number of a micro-batch, one after the other, in float32."""

    def __init__(self, rank, start=1.0):
        super().__init__()
        self.name = f"w{rank}"
        self.weight.fill_(start)
        self.gradient = torch.zeros_like(self.weight)

    def shards(self):
        return {self.name: self.weight}

    def forward_backward(self, micro_batches):
        for batch in micro_batches:
            for token, advantage, logprob in zip(batch.targets, batch.advantages, batch.rollout_logprobs):
                self.gradient = self.gradient * 1.01 + float(token) * 0.1 + float(advantage) * 3.3 + float(logprob)
        return {"actor/tokens_count": sum(b.num_valid_tokens for b in micro_batches), "actor/loss_sum": float("nan")}

    def optim_step(self, denominator):
        if not denominator:
            return OptimReport(False, 0.0, 0.1)
        norm = float(self.gradient.norm() / denominator)
        self.weight -= self.gradient / denominator
        self.gradient.zero_()
        return OptimReport(True, norm, 0.1)


class Bench:
    """A dock and the trainer ranks of two data-parallel replicas, each with its own relay as on two nodes."""

    def __init__(self, config, stack, engines=None, logs=(None, None)):
        engines = engines or [Summing(0), Summing(1)]
        secret = secrets.token_bytes(8)
        server = DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=4, lease_s=30.0, secret=secret).start()
        stack.callback(server.close)
        self.dock = DockClient(server.address, secret, 5.0)
        stack.callback(self.dock.close)
        plan = write_plan(layout())
        self.table = plan.table(layout(), "float32")
        self.path = f"/dev/shm/asyncflow-{os.getpid()}-test{secrets.token_hex(4)}"
        self.trainers = []
        for replica, (engine, log) in enumerate(zip(engines, logs)):
            relay = RelayWriter(f"{self.path}-{replica}", self.table, replica, (replica,))
            publisher = Publisher(
                engine.shards,
                plan.ranks[replica],
                relay,
                platform=CpuPlatform(),
                device=torch.device("cpu"),
                name=f"trainer{replica}",
                timeout_s=5.0,
                tracer=QUIET,
            )
            worker = TrainWorker(
                engine,
                self.dock,
                config.algorithm,
                name=f"trainer{replica}",
                replica=replica,
                publisher=publisher,
                tracer=QUIET,
                samples=log,
            )
            stack.callback(publisher.close)
            if log is not None:
                stack.callback(log.close)
            self.trainers.append(Local(worker, aside=("published",)))

    async def all(self, method, *args):
        return await asyncio.gather(*(getattr(t, method)(*args) for t in self.trainers))


def settings(**workflow):
    return Config.model_validate(
        {
            "trainer": {"data_parallel": REPLICAS, "micro_batch_tokens": 12},
            "algorithm": {"group_size": 2},
            "workflow": {"groups_per_step": GROUPS, "max_lag": 1, "watchdog_s": 5.0} | workflow,
        }
    )


def rows_of(step, rng, oldest=0, newest=0):
    """Columns of a step as rollout and scorer write them; `oldest` sampled the first token, `newest` the others."""
    count = 2 * GROUPS
    lengths = rng.integers(1, 6, count)
    return {
        "prompt_ids": Ragged.from_rows([np.array([step + 1, g], np.int32) for g in range(GROUPS)], "int32"),
        "response_ids": Ragged.from_rows([rng.integers(1, 50, n).astype(np.int32) for n in lengths], "int32"),
        "rollout_logprobs": Ragged.from_rows([rng.normal(size=n).astype(np.float32) for n in lengths], "float32"),
        "response_spans": Ragged.from_flat(*spans_of(oldest, newest, lengths)),
        "finish": np.zeros(count, np.uint8),
        "reward": rng.normal(size=count).astype(np.float32),
        "advantage": rng.normal(size=count).astype(np.float32),
    }


def sampled(step, config):
    """(oldest, newest) version of the rows of a step: in runs that mask, the first token is older than allowed."""
    newest = max(0, step - 1)
    return max(0, newest - (config.workflow.stale == "mask")), newest


def spans_of(oldest, newest, lengths):
    rows = [[[oldest, 0, 1], [newest, 1, n]] if n > 1 else [[oldest, 0, 1]] for n in lengths.tolist()]
    return np.array([span for row in rows for span in row], np.int32), np.cumsum([0, *map(len, rows)])


async def train(bench, config, events):
    """A run of three steps of two chunks and a fourth one without rows, as the loops do it."""
    rng = np.random.default_rng(7)
    events.note("begun", config="trainer: {}")
    await bench.all("start", 0, [])

    async def publish(version):
        shards = await bench.all("published", version)
        events.note("published", manifest=assemble(version, bench.table, bench.path, [s.checksums for s in shards]))

    await publish(0)
    for step in range(4):
        if step < 3:
            put(bench, step, config, rng)
        tokens = samples = 0
        for _ in range(2 if step < 3 else 0):
            sums = await train_chunk(bench, step, config, events)
            tokens += int(sum(s["actor/tokens_count"] for s in sums))
            samples += GROUPS
        finish = await bench.all("finish", step + 1, tokens, samples)
        events.note("finished", version=step + 1, tokens=tokens, samples=samples, optim=finish[0].optim)
        await publish(step + 1)


def put(bench, step, config, rng):
    ids, (oldest, newest) = np.arange(GROUPS) + step * GROUPS, sampled(step, config)
    values = rows_of(step, rng, oldest, newest)
    versions = tuple(np.full(2 * GROUPS, version, np.int32) for version in (oldest, newest))
    bench.dock.put("train", ids, [2] * GROUPS, [2] * GROUPS, [0, 1] * GROUPS, values, versions=versions)


async def train_chunk(bench, step, config, events):
    claim = bench.dock.claim("train", 2, partition="train", worker="trainer", unit="groups", at_least=2)
    infos = batcher.RowInfos(claim.rows, claim.group_ids, claim.members, claim.tokens)
    plan = batcher.plan(infos, REPLICAS, config.trainer.micro_batch_tokens)
    versions = dict(zip(claim.rows.tolist(), zip(claim.version_min.tolist(), claim.version_max.tolist())))
    groups = dict(zip(claim.rows.tolist(), zip(claim.group_ids.tolist(), claim.members.tolist())))
    law = step - config.workflow.max_lag if config.workflow.stale == "mask" else None
    rules = ChunkRules(step, law)
    sums = [r.sums for r in await bench.all("train", plan, versions, groups, rules)]
    events.note("trained", step=step, plan=plan, groups=groups, versions=versions, sums=sums, rules=rules, rewards={})
    bench.dock.done(claim.claim_id)
    bench.dock.free(claim.rows)
    return sums


def record(folder, config):
    with contextlib.ExitStack() as stack:
        bench = Bench(config, stack, logs=[SampleLog(folder, replica, 1 << 20) for replica in range(REPLICAS)])

        async def main():
            events = EventLog(folder / "events.jsonl")
            await train(bench, config, events)
            events.close()

        asyncio.run(main())


def edit_events(folder, change):
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(event) + "\n" for event in change(events)))


def edit_samples(folder, step, replica, change):
    path = file_of(folder, step, replica)
    with np.load(path) as file:
        arrays = {name: file[name].copy() for name in file.files}
    change(arrays)
    np.savez(path, **arrays)
