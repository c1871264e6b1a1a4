"""Measuring the blocks of a run on its real workers: one replica, one data-parallel replica of the trainer.

Batches of several sizes go through dock, engine, scorer and trainer by hand, each block with nothing beside it; then
both sides are kept busy at the same time. Times are those that the driver sees, so they hold what calls and rows cost.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.config import Config
from mindspeed_asyncflow.dock.client import Claim
from mindspeed_asyncflow.planner.fit import Point
from mindspeed_asyncflow.service.session import Session
from mindspeed_asyncflow.workflow import batcher
from mindspeed_asyncflow.workflow.answering import rows_of
from mindspeed_asyncflow.workflow.book import StepBook
from mindspeed_asyncflow.workflow.dock_port import Dock
from mindspeed_asyncflow.workflow.train_worker import ChunkRules
from mindspeed_asyncflow.workflow.weight_sync import expected_of

REPEATS = 2
BESIDE = 4  # steps of each side that are measured with both busy
CLAIM_S = 30.0  # rows are there when they are claimed: a wait this long means that something is broken


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of answers that is ready to be trained, and how long its samples are."""

    claim: Claim
    prompts: np.ndarray  # int64 [n] tokens
    answers: np.ndarray  # int64 [n] tokens


class Blocks:
    """The workers of a session, one block at a time."""

    def __init__(self, session: Session, say: Callable[[str], None]) -> None:
        self.session, self.config, self.say = session, session.config, say
        self.book = StepBook(session.config.algorithm.group_size)
        self.points: list[Point] = []
        self.seen: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        self.batch = self.version = 0

    @property
    def dock(self) -> Dock:
        assert self.session.dock is not None, "the session has started"
        return self.session.dock

    def note(self, block: str, began: float, **amounts: float) -> float:
        seconds = time.perf_counter() - began
        self.points.append(Point(block, amounts, seconds))
        return seconds

    async def put(self, groups: int) -> None:
        """The next `groups` prompts into the dock."""
        issues: list[Any] = []
        while len(issues) < groups:
            more = self.session._next_batch()
            if more is None:
                return
            issues += more
        await self.dock.put_groups(self.book.make_groups(self.batch, issues[:groups]))
        self.batch += 1

    async def claim(self, task: str, groups: int, worker: str) -> Claim:
        began = time.perf_counter()
        claim = await self.dock.claim(task, groups, worker=worker, at_least=groups, timeout_s=CLAIM_S)
        self.note("claim", began)
        return claim

    async def answer(self, groups: int) -> Rows:
        """From prompts to rows that can be trained: generation, scoring, the reference where there is one."""
        await self.put(groups)
        claim = await self.claim("rollout", groups, "rollout0")
        began = time.perf_counter()
        await self.session.rollouts[0].generate(claim.claim_id, rows_of(claim))
        seconds = time.perf_counter() - began
        claim = await self.claim("reward", groups, "scorer")
        began = time.perf_counter()
        report = await self.session.scorer.score(claim.claim_id, rows_of(claim))
        if report.unscored:
            await self.dock.drop_rows(np.array(list(report.unscored), np.int64), "unscored")
        await self.dock.done(claim.claim_id)
        self.note("score", began, rows=len(claim.rows))
        if self.session.references:
            claim = await self.claim("reference", groups, "reference0")
            began = time.perf_counter()
            await self.session.references[0].logprobs(claim.claim_id, rows_of(claim))
            self.note("reference", began, tokens=float(claim.tokens.sum()), squares=_squares(claim.tokens))
        claim = await self.claim("train", groups, "trainer")
        columns = await self.dock.read(claim.rows, ["prompt_ids", "response_ids"])
        lengths = [np.array([len(ids) for ids in columns[name]]) for name in ("prompt_ids", "response_ids")]
        rows = Rows(claim, *lengths)
        self.points.append(Point("generate", amounts_of(rows, self.config.rollout.max_running), seconds))
        for counter, values in zip(self.seen, lengths):
            counter.update(values.tolist())
        return rows

    async def train(self, rows: Rows, micro_batch_tokens: int) -> None:
        """Forward and backward over the rows of a claim, as a step of the train loop does it."""
        claim, t = rows.claim, self.config.trainer
        handles, tokens = claim.rows.tolist(), claim.tokens
        began = time.perf_counter()
        infos = batcher.RowInfos(claim.rows, claim.group_ids, claim.members, tokens)
        plan = batcher.plan(infos, 1, micro_batch_tokens, t.pipeline_parallel if t.virtual_pipeline else 1)
        versions = dict.fromkeys(handles, (0, 0))
        groups = dict(zip(handles, zip(claim.group_ids.tolist(), claim.members.tolist())))
        await asyncio.gather(*(w.train(plan, versions, groups, ChunkRules(0)) for w in self.session.trainers))
        await self.dock.read(claim.rows, ["reward"])
        count = float(len(plan[0]))
        self.note("train", began, micro_batches=count, tokens=float(tokens.sum()), squares=_squares(tokens))

    async def free(self, rows: Rows) -> None:
        await self.dock.done(rows.claim.claim_id)
        await self.dock.free(rows.claim.rows)

    async def finish(self, rows: Rows, load: bool) -> None:
        """Optimizer step and what the trainer does with each version; with `load`, the replica gets it too."""
        self.version += 1
        trainers, version = self.session.trainers, self.version
        began = time.perf_counter()
        tokens = int(rows.answers.sum())
        done = await asyncio.gather(*(w.finish(version, tokens, len(rows.answers)) for w in trainers))
        expected = expected_of(trainers)
        await expected
        self.note("optimizer", began)
        shards = await asyncio.gather(*(w.published(version) for w in trainers))
        self.points.append(Point("publish", {}, max(s.seconds for s in shards)))
        self.session.sync.publish(shards, expected, done[0].optim)
        if load:
            began = time.perf_counter()
            await self.session.bring_all_up()
            self.note("load", began)


def amounts_of(rows: Rows, max_running: int) -> dict[str, float]:
    """What a generation call of these rows has to do."""
    prompts, answers = rows.prompts.astype(np.float64), rows.answers.astype(np.float64)
    tokens = float(answers.sum())
    return {
        "prompt_tokens": float(prompts.sum()),
        "steps": max(float(answers.max(initial=0.0)), tokens / max_running),
        "tokens": tokens,
        "context": float((prompts * answers + answers * (answers - 1) / 2).sum()),
    }


def _squares(tokens: np.ndarray) -> float:
    return float((tokens.astype(np.float64) ** 2).sum())


def sizes_of(config: Config) -> list[int]:
    """Groups of the batches that are measured: up to what a step has and a replica holds, and what a chunk has."""
    most = min(config.workflow.groups_per_step, max(1, config.rollout.max_running // config.algorithm.group_size))
    return sorted({1, max(1, most // 8), max(1, most // 4), max(1, most // 2), most})


async def alone(blocks: Blocks) -> None:
    """Every block with nothing beside it."""
    config, longest = blocks.config, blocks.config.data.max_prompt_tokens + blocks.config.rollout.max_new_tokens
    usual = config.trainer.micro_batch_tokens
    sizes = sizes_of(config)
    warm = await blocks.answer(sizes[-1])
    await blocks.train(warm, usual)
    await blocks.finish(warm, load=True)
    await blocks.free(warm)
    blocks.points.clear()  # first calls compile, allocate and connect
    for repeat in range(REPEATS):
        for groups in sizes:
            blocks.say(f"measuring {groups} prompt groups, {repeat + 1} of {REPEATS}")
            rows = await blocks.answer(groups)
            total = int(rows.claim.tokens.sum())
            for micro in sorted({usual, max(longest, min(usual, total) // 2), max(longest, min(usual, total) // 4)}):
                await blocks.train(rows, micro)
            await blocks.finish(rows, load=True)
            await blocks.free(rows)


async def beside(blocks: Blocks) -> tuple[list[Point], list[Point]]:
    """(generation, training) with both sides busy: the trainer steps while the replica answers, and the other way."""
    config, sizes = blocks.config, sizes_of(blocks.config)
    blocks.say("measuring both sides at the same time")
    rows = await blocks.answer(sizes[-1])
    before = len(blocks.points)
    trained = asyncio.Event()
    answered = 0

    async def answering() -> None:
        nonlocal answered
        while not trained.is_set() or answered < BESIDE:
            await blocks.free(await blocks.answer(sizes[-1]))
            answered += 1

    async def training() -> None:
        steps = 0
        while steps < BESIDE or answered < BESIDE:
            await blocks.train(rows, config.trainer.micro_batch_tokens)
            await blocks.finish(rows, load=False)
            steps += 1
        trained.set()

    await asyncio.gather(answering(), training())
    await blocks.free(rows)
    measured = blocks.points[before:]
    del blocks.points[before:]
    return [p for p in measured if p.block == "generate"], [p for p in measured if p.block == "train"]


def replica_alone(config: Config) -> Config:
    """One replica and one data-parallel replica of the trainer, without what a run does beside its steps."""
    trainer = config.trainer.model_copy(update={"data_parallel": 1, "distributed_optimizer": False})
    sections = {
        "trainer": trainer,
        "rollout": config.rollout.model_copy(update={"replicas": 1, "min_replicas": None}),
        "workflow": config.workflow.model_copy(update={"schedule": "separated", "lend": False, "update": "delayed"}),
        "evaluation": config.evaluation.model_copy(update={"prompts": 0, "every": None}),
        "observe": config.observe.model_copy(update={"tensorboard": False, "events": False}),
    }
    return config.model_copy(update=sections)
