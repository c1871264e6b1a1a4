"""What stands in for the workers of a real run: the same methods, `Costs` in place of devices.

A rollout replica is a `SimulatedEngine`. All trainer ranks are one proxy, since they work in step: a chunk takes as
long as its slowest data-parallel replica. The trainer also checks the law, from what the simulation knows of each row
and not from what the controller says.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mindspeed_asyncflow.algorithms.moments import Moments
from mindspeed_asyncflow.engines.simulated import SimulatedEngine
from mindspeed_asyncflow.observe.trace import get_tracer
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.records import OptimReport, UpdateReport, WeightManifest
from mindspeed_asyncflow.reshard.relay_mirror import PullReport
from mindspeed_asyncflow.simulation.dock import SimDock
from mindspeed_asyncflow.simulation.prompts import Prompts
from mindspeed_asyncflow.workflow.publisher import RankShards
from mindspeed_asyncflow.workflow.score_worker import ScoreReport
from mindspeed_asyncflow.workflow.train_worker import ChunkReport, ChunkRules, FinishReport
from mindspeed_asyncflow.workflow.workers import RolloutReport, RowBatch


def now() -> float:
    return asyncio.get_running_loop().time()


class SimRollout:
    """One replica. `budget`: tokens that an answer may get in one round, None: all; `moved`: bytes of a version."""

    def __init__(
        self, index: int, dock: SimDock, costs: Costs, max_running: int, budget: int | None, load_s: float, moved: int
    ) -> None:
        self.name, self.dock, self.costs, self.budget = f"rollout{index}", dock, costs, budget
        self.engine = SimulatedEngine(costs, max_running)
        self.load_s, self.bytes = load_s, moved
        self.exposed_s = 0.0  # time in which answers, or the next batch, waited for weights
        self.loads = 0
        self._fingerprints = {0: ""}
        self._lost: BaseException | None = None

    async def generate(self, claim_id: int, batch: RowBatch) -> RolloutReport:
        self._check()
        began, rows = now(), self.dock.rows
        slots = self.dock.slots(batch.rows)
        rows.rounds[slots] += 1
        left = rows.target[slots] - rows.done[slots]
        if self.budget is not None:
            left = np.minimum(left, self.budget)
        tokens, unfinished, served = 0, [], set()

        def deliver(places: np.ndarray, done: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
            nonlocal tokens
            mine = slots[places]
            tokens += int(done.sum())
            rows.generated(mine, done, first, last)
            served.update(last.tolist())
            whole = rows.done[mine] >= rows.target[mine]
            if whole.any():
                self.dock.answered(claim_id, mine[whole])
            if not whole.all():
                some = ~whole & (last >= 0)
                for version in np.unique(last[some]).tolist():
                    rows.note_span(mine[some & (last == version)], rows.done[mine[some & (last == version)]], version)
                back = batch.rows[places[~whole]]
                unfinished.extend(back.tolist())
                self.dock.give_back(claim_id, back)

        def note(places: np.ndarray, done: np.ndarray, version: int) -> None:
            mine = slots[places]
            rows.note_span(mine, rows.done[mine] + done, version)

        with get_tracer().span("rollout/generate", lane=self.name, rows=len(batch), version=self.engine.version):
            context = rows.prompt[slots] + rows.done[slots]
            answers = self.engine.submit(context, left, batch.group_ids, deliver, note)
            try:
                await answers
            except asyncio.CancelledError:
                self.engine.withdraw(answers)
                raise
        self._check()
        complete = len(batch) - len(unfinished)
        if complete:
            self.dock.finish(claim_id)
        pairs = tuple((v, self._fingerprints[v]) for v in sorted(served) if v >= 0)
        return RolloutReport(complete, tokens, now() - began, pairs, tuple(unfinished))

    async def stop(self) -> int:
        self._check()
        return self.engine.stop()

    async def running(self) -> int:
        self._check()
        return len(self.engine)

    async def load(self, manifest: WeightManifest) -> UpdateReport:
        self._check()
        with get_tracer().span("rollout/load_weights", lane=self.name, version=manifest.version):
            await self.engine.load(manifest.version, self.load_s)
        self._check()
        self.exposed_s += self.load_s
        self.loads += 1
        self._fingerprints[manifest.version] = manifest.fingerprint
        return UpdateReport(manifest.version, self.load_s, manifest.fingerprint)

    async def fetch(self, manifest: WeightManifest) -> tuple[WeightManifest, PullReport]:
        with get_tracer().span("rollout/fetch_weights", lane=f"{self.name} fetches", version=manifest.version):
            await asyncio.sleep(self.costs.fetch_s)
        self._check()
        return manifest, PullReport(manifest.version, self.bytes, self.bytes, self.costs.fetch_s)

    async def score(self, sequences: Sequence[Any]) -> tuple[int, list[np.ndarray]]:
        return self.engine.version, []

    async def rouse(self) -> None:
        self._check()

    async def rest(self) -> None:
        self._check()

    def lose(self, error: BaseException) -> None:
        """The process dies: every call to it fails from now on."""
        self._lost = error
        self.engine.fail(error)

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost


class SimScorer:
    """Rule-based rewards of whole groups. `flat`: the workload says which groups have equal rewards; they are dropped
    under `algorithm.dynamic_sampling`. `unscored_share`: rows that get no score (faults)."""

    def __init__(self, dock: SimDock, costs: Costs, prompts: Prompts, drop_flat: bool, unscored_share: float) -> None:
        self.dock, self.costs, self.prompts, self.drop_flat = dock, costs, prompts, drop_flat
        self.unscored_share = unscored_share
        self.busy_s = 0.0

    async def score(self, claim_id: int, batch: RowBatch, again: bool = False) -> ScoreReport:
        slots = self.dock.slots(batch.rows)
        took = float(self.costs.score_s(float(len(batch))))
        with get_tracer().span("reward/score", lane="scorer", rows=len(batch)):
            await asyncio.sleep(took)
        self.busy_s += took
        if not self.unscored_share and not self.drop_flat:
            self.dock.scored(claim_id, slots)
            return ScoreReport({}, took, ())
        silent = np.zeros(len(batch), bool)
        if self.unscored_share:
            silent = self.prompts.chance(batch.group_ids, batch.members, "unscored") < self.unscored_share
        flat: tuple[int, ...] = ()
        level = silent & False
        if self.drop_flat:
            level = self.dock.rows.flat[slots] & ~silent
            flat = tuple(np.unique(batch.group_ids[level]).tolist())
        kept = ~(silent | level)
        if kept.any():
            self.dock.scored(claim_id, slots[kept])
        unscored = dict.fromkeys(batch.rows[silent].tolist(), "no score (simulated fault)") if silent.any() else {}
        return ScoreReport(unscored, took, flat)


class SimReference:
    """One replica of the frozen reference policy. `devices`: that share its work."""

    def __init__(self, index: int, dock: SimDock, costs: Costs, devices: int) -> None:
        self.name, self.dock, self.costs, self.devices = f"reference{index}", dock, costs, devices
        self.busy_s = 0.0

    async def logprobs(self, claim_id: int, batch: RowBatch) -> float:
        slots = self.dock.slots(batch.rows)
        lengths = (self.dock.rows.prompt[slots] + self.dock.rows.done[slots]).astype(np.float64)
        took = float(self.costs.forward_s(lengths.sum(), (lengths**2).sum())) / self.devices
        with get_tracer().span("reference/logprobs", lane=self.name, rows=len(batch)):
            await asyncio.sleep(took)
        self.busy_s += took
        self.dock.referenced(claim_id, slots)
        self.dock.finish(claim_id)
        return took


class Law:
    """Every trained row: no token older than `max_lag`, no row twice. Counts violations; a sound run has none."""

    def __init__(self, max_lag: int, group_size: int) -> None:
        self.max_lag, self.group_size = max_lag, group_size
        self.violations: Counter[str] = Counter()
        self.lags: Counter[int] = Counter()  # of the oldest trained token of each row
        self.tokens = self.prompt_tokens = self.rows = 0
        self._oldest: int | None = None
        self._trained = np.zeros(0, bool)

    def check(
        self, dock: SimDock, slots: np.ndarray, version: int, oldest_allowed: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows that are trained at `version`, tokens before `oldest_allowed` masked.

        Returns of each row how many tokens are trained, and the version of the oldest of these.
        """
        rows = dock.rows
        oldest = rows.oldest[slots]
        tokens = rows.done[slots]
        if oldest_allowed is not None:
            tokens = rows.younger(slots, oldest_allowed)
            oldest = np.where(tokens > 0, np.maximum(oldest, oldest_allowed), version)
        lag = version - oldest
        if len(oldest):
            lowest = int(oldest.min())
            self._oldest = lowest if self._oldest is None else min(self._oldest, lowest)
        self._count("older than max_lag", lag > self.max_lag)
        self._count("sampled by a version that is not made yet", rows.newest[slots] > version)
        self._count("answer not complete", rows.done[slots] != rows.target[slots])
        table = dock.part
        names = table.groups.id[table.rows.group[slots]] * self.group_size + table.rows.member[slots]
        if len(names) and names.max() >= len(self._trained):
            self._trained = np.concatenate([self._trained, np.zeros(names.max() + 1, bool)])
        self._count("trained twice", self._trained[names])
        self._trained[names] = True
        values, counts = np.unique(lag, return_counts=True)
        self.lags.update(dict(zip(values.tolist(), counts.tolist())))
        self.rows += len(slots)
        self.tokens += int(rows.done[slots].sum())
        self.prompt_tokens += int(rows.prompt[slots].sum())
        return tokens, oldest

    def take_oldest(self) -> int:
        """Oldest version that sampled a token trained since the last call; -1: none was trained."""
        oldest, self._oldest = self._oldest, None
        return -1 if oldest is None else oldest

    def _count(self, what: str, wrong: np.ndarray) -> None:
        if wrong.any():
            self.violations[what] += int(wrong.sum())


class SimTrainer:
    """All ranks of the trainer. `publish_s`: a version's way to where replicas fetch it, beside training."""

    def __init__(self, dock: SimDock, costs: Costs, law: Law, publish_s: float) -> None:
        self.dock, self.costs, self.law, self.publish_s = dock, costs, law, publish_s
        self.version = 0
        self.busy_s = self.waited_s = 0.0
        self.spans: list[tuple[float, float]] = []  # begin and end of work
        self._published: dict[int, float] = {}  # when each version is in the relay
        self.on_finish: Callable[[], None] = lambda: None

    async def start(self, version: int, probe: Any) -> None:
        self._published[version] = now() + self.publish_s

    async def train(
        self, plan: Sequence[Sequence[Sequence[int]]], versions: Any, groups: Any, rules: ChunkRules,
        samples_wanted: int = 0,
    ) -> ChunkReport:  # fmt: skip
        counts = [sum(map(len, replica)) for replica in plan]
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(plan)), np.int64, sum(counts))
        slots = self.dock.slots(flat)
        replica = np.repeat(np.arange(len(plan)), counts)
        prompt, answer = self.dock.rows.prompt[slots], self.dock.rows.done[slots]
        lengths = (prompt + answer).astype(np.float64)
        load = np.bincount(replica, lengths, len(plan))
        squares = np.bincount(replica, lengths**2, len(plan))
        took = float(np.max(self.costs.train_s(load, squares, np.array([len(r) for r in plan], np.float64))))
        tokens, oldest = self.law.check(self.dock, slots, self.version, rules.oldest_allowed)
        trained, some = int(tokens.sum()), tokens > 0
        with get_tracer().span("train/forward_backward", lane="trainer", rows=len(slots), version=self.version):
            await self._work(took)
        sums = {"actor/tokens_count": float(trained), "samples_count": float(len(slots))}
        sums |= {"actor/loss_tokens_count": float(trained), "actor/loss_sequences_count": float(len(slots))}
        for name, values in (("prompt_length", prompt), ("response_length", answer)):
            sums |= {
                f"{name}_sum": float(values.sum()), f"{name}/max": float(values.max(initial=0)),
                f"{name}/min": float(values.min(initial=answer.max(initial=0))),
            }  # fmt: skip
        oldest_trained = dict(zip(flat[some].tolist(), oldest[some].tolist()))
        return ChunkReport(sums, took, masked_tokens=int(answer.sum()) - trained, oldest_trained=oldest_trained)

    async def moments(self, rows: Sequence[int], rules: ChunkRules) -> tuple[Moments, Moments]:
        return Moments(), Moments()

    async def finish(self, version: int, tokens: int, sequences: int) -> FinishReport:
        began = now()
        with get_tracer().span("train/wait_published", lane="trainer"):
            await asyncio.sleep(max(0.0, self._published.get(version - 1, 0.0) - now()))
        waited = now() - began
        with get_tracer().span("train/optimizer", lane="trainer", version=version):
            await self._work(self.costs.optimizer_s)
        self.waited_s += waited
        self.version = version
        self._published[version] = now() + self.publish_s
        self._published.pop(version - 2, None)
        self.on_finish()
        return FinishReport(OptimReport(True, 1.0, 1e-6), now() - began, waited)

    async def published(self, version: int) -> RankShards:
        await asyncio.sleep(max(0.0, self._published[version] - now()))
        return RankShards(version, {0: version + 1}, self.publish_s)

    async def score_probe(self) -> list[np.ndarray]:
        return []

    async def give(self) -> None:
        with get_tracer().span("train/give", lane="trainer"):
            await asyncio.sleep(self.costs.give_s)

    async def take_back(self) -> None:
        with get_tracer().span("train/take_back", lane="trainer"):
            await asyncio.sleep(self.costs.take_s)

    async def _work(self, seconds: float) -> None:
        began = now()
        await asyncio.sleep(seconds)
        self.busy_s += seconds
        self.spans.append((began, now()))
