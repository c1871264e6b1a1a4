"""Evaluation: k answers to each of a fixed set of prompts, all from one policy version.

    when             how                 which replicas                                    answers at the same time
    before training  the loops wait      all that have devices of their own (without any:  rollout.max_running each
    after it                             those that share them, in their turn)
    every N steps,
    max_lag 0 or
    shared devices
    every N steps,   beside all loops    those that serve the version, each from its next  evaluation.share of it each
    max_lag >= 1                         boundary on

A replica that takes part is *held* (holds.py): it loads nothing until its last answer here has ended. Beside the loops
it goes on with batches that its version is young enough for; when one comes that is not, it leaves the rest of the
evaluation to the others, and only the last one lets the batch wait. What a lost replica had is asked of the others;
when nobody serves the version any more, all of it is asked of the newest one.

The seeds are those of (run, prompt, answer): the same in every evaluation of a run and whoever answers.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.data.prompts import Prompt
from mindspeed_asyncflow.data.tasks import named_tasks
from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError, WorkerLost, WorkerReplaced
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.records import Completion
from mindspeed_asyncflow.workflow.arrivals import Published
from mindspeed_asyncflow.workflow.clock import in_time, now
from mindspeed_asyncflow.workflow.holds import Hold
from mindspeed_asyncflow.workflow.recorder import StepRecorder
from mindspeed_asyncflow.workflow.turns import Turns
from mindspeed_asyncflow.workflow.verdict import Judged, Verdict, judge
from mindspeed_asyncflow.workflow.weight_sync import WeightSync
from mindspeed_asyncflow.workflow.workers import Question

ATTEMPTS = 3  # so often an evaluation beside training begins again because all replicas are past its version
SCORER_GRACE_S = 60.0


class Writes(Protocol):
    def write(self, record: Mapping[str, Any]) -> None: ...


def runs_beside(config: Config) -> bool:
    """Whether evaluation runs beside training: engine batches need not repeat, and no device changes hands for it."""
    w = config.workflow
    return w.max_lag >= 1 and not w.lend and w.schedule != "colocated"


def chosen(prompts: Sequence[Prompt], count: int) -> list[tuple[int, Prompt]]:
    """(number of its source, prompt) of at most `count` prompts: of several sources the same number each, as far as
    they have them."""
    of_source: dict[int, deque[Prompt]] = {}
    for prompt in prompts:
        of_source.setdefault(int(json.loads(prompt.fields).get("source", 0)), deque()).append(prompt)
    found: list[tuple[int, Prompt]] = []
    while len(found) < count and any(of_source.values()):
        found += [(number, left.popleft()) for number, left in of_source.items() if left][: count - len(found)]
    return found


def source_names(config: Config) -> list[str]:
    """Of the sources, in the order of their numbers; a name that is there twice gets its number."""
    tasks = [name for name, _ in named_tasks(config.data)]
    return [f"{task} ({i})" if tasks.count(task) > 1 else task for i, task in enumerate(tasks)]


@dataclass
class _Round:
    """One version, as far as it has been measured."""

    wanted: dict[int, Published]  # by replica: where it was there when the round began
    version: int
    judged: dict[int, Judged] = field(default_factory=dict)  # by number of the answer
    holding: set[int] = field(default_factory=set)  # replicas that take part
    gone: dict[int, WorkerLost] = field(default_factory=dict)


class Evaluation:
    """Lives in the driver's event loop. `scorer` as in `Crew`; `records` gets a line for each evaluation."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        sync: WeightSync,
        turns: Turns,
        scorer: Any,
        recorder: StepRecorder,
        records: Writes,
    ) -> None:
        self.config, self.sync, self.turns, self.scorer = config, sync, turns, scorer
        self.recorder, self.records = recorder, records
        e, names = config.evaluation, source_names(config)
        asked = chosen(prompts, e.prompts)
        self.prompts = [p for _, p in asked]
        self._shown = [{"source": names[n], "prompt": p.text, "truth": p.truth} for n, p in asked]
        self.beside = runs_beside(config)
        self.progressed: Callable[[], None] = lambda: None  # told of every part that is done
        self._round: _Round | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        """Answers of one evaluation."""
        return len(self.prompts) * self.config.evaluation.answers

    def is_due(self, version: int) -> bool:
        """Whether `version` is measured in the middle of the run."""
        every = self.config.evaluation.every
        return bool(every and self.count and version % every == 0 and version < self.config.trainer.steps)

    async def between(self) -> Verdict | None:
        """Measure the newest version while nothing is trained. None: there is nothing to ask."""
        if not self.count:
            return None
        return await self._measure(self.config.rollout.max_running, together=True)

    def published(self, version: int, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """`version` has just been published. Where it is due, its evaluation begins, beside training."""
        if not self.beside or not self.is_due(version):
            return
        if self._task is not None and not self._task.done():
            get_logger("evaluation").warning(
                "version %d is not evaluated: the evaluation before it has not ended (raise evaluation.every or "
                "evaluation.share, or lower evaluation.prompts or evaluation.answers)",
                version,
            )
            return
        self._task = spawn(self._beside(self._begin(version)))

    def resumed(self, version: int, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """The run goes on at `version`, which may have been due when its checkpoint was taken."""
        if version not in [verdict.version for verdict in self.recorder.verdicts]:
            self.published(version, spawn)

    async def ended(self) -> None:
        """Wait for an evaluation beside training; the watchdog of the run bounds this."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _beside(self, first: _Round) -> None:
        r = self.config.rollout
        size = max(1, int(self.config.evaluation.share * r.max_running))
        await self._measure(size, together=False, first=first)

    async def _measure(self, size: int, together: bool, first: _Round | None = None) -> Verdict | None:
        """`size`: most answers of a replica at the same time. `together`: each has its share from the beginning, so
        that every engine batch is the same in a repeated run; else it takes the next ones when it has room."""
        began, attempts = now(), 0
        turn = self._round = first or self._begin(self._newest)
        try:
            while left := [n for n in range(self.count) if n not in turn.judged]:
                before = len(turn.gone)
                await self._ask(turn, left, size, together)
                if len(turn.judged) == self.count:
                    break
                attempts += len(turn.gone) == before
                if attempts >= ATTEMPTS:
                    get_logger("evaluation").warning("given up: versions pass faster than replicas can be held at one")
                    return None
                turn = self._round = self._again(turn)
        finally:
            self._round = None
        verdict, record = judge(
            turn.version, self.config.evaluation.temperature, now() - began, self._table(turn), self._shown
        )
        self.records.write(record | {"beside": not together})
        self.recorder.evaluated(verdict)
        return verdict

    @property
    def _newest(self) -> int:
        assert self.sync.newest is not None, "an evaluation follows publish"
        return self.sync.newest.version

    def _begin(self, version: int) -> _Round:
        there = {i: self.sync.arrivals.at(i) for i, replica in enumerate(self.sync.replicas) if replica is not None}
        return _Round({i: p for i, p in there.items() if p is not None and p.version == version}, version)

    def _again(self, turn: _Round) -> _Round:
        """Somebody is lost, or all replicas were past the version: what there is goes on only for the same version."""
        fresh = self._begin(self._newest)
        fresh.gone = turn.gone
        if fresh.version == turn.version:
            fresh.judged = turn.judged
        return fresh

    def _replicas(self, turn: _Round) -> list[int]:
        there = [i for i, replica in enumerate(self.sync.replicas) if replica is not None and i not in turn.gone]
        return [i for i in there if not self.turns.shares(i)] or there

    async def _ask(self, turn: _Round, left: Sequence[int], size: int, together: bool) -> None:
        replicas = self._replicas(turn)
        if not replicas:
            raise next(reversed(turn.gone.values()), WorkerLost("no rollout replica is there to be evaluated"))
        share = math.ceil(len(left) / len(replicas))
        if together:
            portions = [left[i * share : (i + 1) * share] for i in range(len(replicas))]
            queues = [deque(_cut(portion, size)) for portion in portions]
        else:
            queues = [deque(_cut(left, min(size, share)))] * len(replicas)
        tasks = [asyncio.ensure_future(self._replica(turn, i, q, together)) for i, q in zip(replicas, queues) if q]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _replica(self, turn: _Round, index: int, todo: deque[list[int]], together: bool) -> None:
        """What replica `index` takes part with; the rest of `todo` stays."""
        try:
            async with self.turns.generating(index):
                wanted = await self._arrived(turn, index)
                if wanted is None or not todo:
                    return
                async with self.sync.held(index, wanted) as hold:
                    if hold is not None:
                        await self._answers(turn, index, hold, todo, together)
        except WorkerLost as error:
            get_logger("evaluation").warning("asked again without rollout%d: %s", index, error)
            turn.gone[index] = error

    async def _arrived(self, turn: _Round, index: int) -> Published | None:
        """The version of this round where replica `index` runs. When it has arrived nowhere yet (all replicas are on
        other nodes than the trainers), the round is about what arrives first, which may be a newer one."""
        if index in turn.wanted:
            return turn.wanted[index]
        await self.sync.arrivals.wait(index, turn.version)
        arrived = self.sync.arrivals.at(index)
        if arrived is not None and not turn.wanted:
            turn.version = arrived.version
        if arrived is None or arrived.version != turn.version:
            return None
        turn.wanted[index] = arrived
        return arrived

    async def _answers(self, turn: _Round, index: int, hold: Hold, todo: deque[list[int]], together: bool) -> None:
        turn.holding.add(index)
        try:
            while todo and (together or not hold.wanted or len(turn.holding) == 1):
                part = todo.popleft()
                try:
                    await self._part(turn, index, part)
                except WorkerLost:
                    todo.appendleft(part)
                    raise
        finally:
            turn.holding.discard(index)

    async def _part(self, turn: _Round, index: int, part: list[int]) -> None:
        replica = self.sync.replicas[index]
        if replica is None:
            raise WorkerLost(f"rollout{index} has gone")
        k = self.config.evaluation.answers
        prompts = [self.prompts[n // k] for n in part]
        questions = [Question((-2 - n // k, n % k), p.ids, p.truth, p.fields) for n, p in zip(part, prompts)]
        with self.recorder.busy(f"rollout{index}"):
            asked = replica.answer(questions, self.config.evaluation.temperature)  # type: ignore[attr-defined]
            answers: list[Completion] = await self.sync.in_time(index, asked, "evaluation answers")
        self._check_version(turn.version, index, answers)
        self.progressed()
        turn.judged |= zip(part, await self._judge(answers, prompts))
        self.progressed()

    def _check_version(self, version: int, index: int, answers: Sequence[Completion]) -> None:
        self.sync.check_served(index, version, {(a.spans[-1].version, a.fingerprint) for a in answers if a.spans})
        others = {s.version for a in answers for s in a.spans} - {version}
        if others:
            raise WeightSyncError(
                f"rollout{index} was held at version {version} for an evaluation and answered with {sorted(others)}"
            )

    async def _judge(self, answers: Sequence[Completion], prompts: Sequence[Prompt]) -> list[Judged]:
        while True:
            try:
                return await self._judged(answers, prompts)
            except WorkerReplaced as error:
                get_logger("evaluation").warning("answers are scored again: %s", error)

    async def _judged(self, answers: Sequence[Completion], prompts: Sequence[Prompt]) -> list[Judged]:
        r = self.config.reward
        limit_s = r.timeout_s * math.ceil(len(answers) / r.workers) + SCORER_GRACE_S + self.config.faults.heartbeat_s
        talks = [a.mask for a in answers if a.mask is not None]
        scoring = self.scorer.score_answers(
            [a.token_ids for a in answers],
            talks if len(talks) == len(answers) else None,
            [p.truth for p in prompts],
            [a.finish_reason == "stop" for a in answers],
            [p.fields for p in prompts],
        )
        try:
            scores, texts = await in_time(scoring, limit_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"the scorer did not score {len(answers)} evaluation answers within {limit_s:g} s (reward.timeout_s)"
            ) from None
        return [Judged(t, math.nan if s.value is None else s.value) for s, t in zip(scores, texts)]

    def _table(self, turn: _Round) -> list[list[Judged]]:
        k = self.config.evaluation.answers
        return [[turn.judged[n * k + a] for a in range(k)] for n in range(len(self.prompts))]

    def describe(self) -> str:
        """One line for messages of the no-progress watchdog; empty while nothing is measured."""
        turn = self._round
        if turn is None:
            return ""
        who = ", ".join(f"rollout{i}" for i in sorted(turn.holding)) or "no replica yet"
        return f"evaluation: version {turn.version} has {len(turn.judged)} of {self.count} answers, asked of {who}"


def _cut(numbers: Sequence[int], size: int) -> list[list[int]]:
    return [list(numbers[i : i + size]) for i in range(0, len(numbers), size)]
