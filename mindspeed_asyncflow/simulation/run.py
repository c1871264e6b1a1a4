"""One simulated run: the loops of `workflow/run.py` over simulated workers on a virtual clock."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Any

import numpy as np

from mindspeed_asyncflow.config.feasibility import own_replicas, sharing_replicas
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.observe.writers import SampleText
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.estimate import estimate
from mindspeed_asyncflow.planner.workload import Workload
from mindspeed_asyncflow.reshard.relay_table import RelayTable
from mindspeed_asyncflow.simulation import clock, faults
from mindspeed_asyncflow.simulation.dock import SimDock
from mindspeed_asyncflow.simulation.mirrors import Mirrors
from mindspeed_asyncflow.simulation.prompts import Prompts
from mindspeed_asyncflow.simulation.result import LABEL, Mark, Marks, SimulationResult, blocks, idle_of
from mindspeed_asyncflow.simulation.telling import SimMetrics, SimProgress
from mindspeed_asyncflow.simulation.workers import Law, SimReference, SimRollout, SimScorer, SimTrainer
from mindspeed_asyncflow.workflow.job import Crew
from mindspeed_asyncflow.workflow.recorder import StepRecorder
from mindspeed_asyncflow.workflow.run import Run
from mindspeed_asyncflow.workflow.turns import NoTurns, Turns
from mindspeed_asyncflow.workflow.weight_sync import WeightSync, expected_of

# One number stands for all weights: what loops know of a version is its number and fingerprint.
TABLE = RelayTable([("weights", "float32", (1, 1), [(0, 1, 0, 1, 0)])])


class NoSamples:
    def write(self, step: int, sample: SampleText) -> None: ...


def simulate(
    config: Config, costs: Costs, *, metrics: Any = None, progress: SimProgress | None = None
) -> SimulationResult:
    """Run `simulation.steps` steps of `config` and measure them. A pure function of its arguments but for `real_s`.

    `metrics`: a `MetricsWriter` for each step's metrics, less what is not simulated (`telling.py`); spans go to the
    tracer of this process. Raises what a real run would raise, and SimulationError for a deadlock.
    """
    began = time.perf_counter()
    config = settled(config, costs)

    async def main() -> Simulation:
        simulation = Simulation(config, costs, SimMetrics(metrics), progress)
        await simulation.go()
        return simulation

    return clock.run(main()).result(time.perf_counter() - began)


def settled(config: Config, costs: Costs) -> Config:
    """What a simulation does not have is off, and deadlines suit virtual time."""
    patience = 100 * estimate(config, costs, Workload.of(config)).step_s
    watchdog = max(config.workflow.watchdog_s, patience)
    return config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"steps": config.simulation.steps, "save_every": None}),
            "workflow": config.workflow.model_copy(update={"probe_answers": 0, "watchdog_s": watchdog}),
            "rollout": config.rollout.model_copy(update={"timeout_s": watchdog}),
            "evaluation": config.evaluation.model_copy(update={"every": None, "prompts": 0}),
            "observe": config.observe.model_copy(update={"samples_per_step": 0, "events": False}),
        }
    )


class Simulation:
    """Made inside the virtual loop."""

    def __init__(self, config: Config, costs: Costs, metrics: SimMetrics, progress: SimProgress | None) -> None:
        self.config, self.costs = config, costs
        c, w, s = config, config.workflow, config.simulation
        self.faults = faults.parse(s.faults, c.rollout.replicas)
        workload = Workload.of(config)
        prompts = Prompts(workload, s.seed, s.flat_share)
        with_reference = c.algorithm.kl_coef > 0
        expected_s = estimate(config, costs, workload).step_s
        self.dock = SimDock(
            prompts.truth,
            with_reference=with_reference,
            claim_s=costs.claim_s,
            patience_s=max(2.0, 0.01 * expected_s),
        )
        self.law = Law(w.max_lag, c.algorithm.group_size)
        in_place = w.schedule == "colocated"
        self.trainer = SimTrainer(self.dock, costs, self.law, 0.0 if in_place else costs.publish_s)
        self.trainer.on_finish = self._step_done
        unscored = sum(f.amount for f in self.faults if f.kind == "unscored")
        self.scorer = SimScorer(self.dock, costs, prompts, c.algorithm.dynamic_sampling, unscored)
        count = s.references if with_reference else 0
        self.references = [SimReference(i, self.dock, costs, s.reference_devices) for i in range(count)]
        late = {f.index for f in self.faults if f.kind == "join"}
        total = own_replicas(config) + sharing_replicas(config)
        self.rollouts = {i: self._rollout(i) for i in range(total) if i not in late}
        quiet = progress or SimProgress(c.trainer.steps, io.StringIO(), live=False)
        loop = asyncio.get_running_loop()
        self.recorder = StepRecorder(c, metrics, NoSamples(), quiet, str, loop.time)  # type: ignore[arg-type]
        self.mirrors = Mirrors(config, 0.0 if in_place else costs.fetch_s, self._fetch, self.rollouts)
        self.sync = WeightSync(
            [self.rollouts.get(i) for i in range(total)],
            "float32",
            "simulated",
            TABLE.text,
            update=w.update,
            keep=w.keep_versions,
            mirrors=self.mirrors.all(),
            busy=self.recorder.busy,
        )
        self.turns: Turns = NoTurns()
        if sharing_replicas(config):
            mine = {i: r for i, r in self.rollouts.items() if i >= own_replicas(config)}
            self.turns = Turns([self.trainer], mine, interrupt=not in_place, emptied=self.sync.emptied)
        crew = Crew(dict(self.rollouts), self.scorer, self.references, [self.trainer], [0], starting=late)
        self.run = Run(
            config, self.dock, prompts.batches(), crew, self.sync, self.recorder, None, _save_nothing,
            turns=self.turns,
        )  # fmt: skip
        self.marks = Marks(self._mark())

    def _rollout(self, index: int) -> SimRollout:
        c = self.config
        rounds = c.workflow.partial_rounds
        budget = None if rounds is None else -(-c.rollout.max_new_tokens // rounds)
        load_s = 0.0 if c.workflow.schedule == "colocated" else self.costs.load_s
        return SimRollout(index, self.dock, self.costs, c.rollout.max_running, budget, load_s, TABLE.slot_bytes)

    async def _fetch(self, index: int, manifest: Any) -> Any:
        return await self.rollouts[index].fetch(manifest)

    async def go(self) -> None:
        await self.trainer.start(0, [])
        self.sync.publish([await self.trainer.published(0)], expected_of([self.trainer]))
        await asyncio.gather(*(self._bring_up(i) for i in self.rollouts if not self.turns.shares(i)))
        for rollout in self.rollouts.values():
            rollout.exposed_s, rollout.loads = 0.0, 0
        self.recorder.begin()
        self.marks.begun = self._mark()
        for fault in self.faults:
            if fault.kind != "unscored":
                self.run.job.spawn(self._happen(fault))  # what it raises ends the run, whose end cancels it
        await self.run.train()
        self.recorder.end()

    async def _bring_up(self, index: int) -> None:
        """As a run starts: replicas with devices of their own load version 0 before the loops begin."""
        await self.sync.arrivals.wait(index, 0)
        await self.sync.bring_up(index)

    # -- faults ----------------------------------------------------------------------------------------------------

    async def _happen(self, fault: faults.Fault) -> None:
        await asyncio.sleep(fault.at_s)
        index = fault.index
        if fault.kind == "join":
            self.rollouts[index] = self._rollout(index)
            self.mirrors.joined(index, self.sync)
            self.run.join(index, self.rollouts[index])
            return
        if index not in self.rollouts:
            return
        if fault.kind == "slow":
            self.rollouts[index].engine.set_speed(1 / fault.amount)
            return
        rollout = self.rollouts.pop(index)
        self.mirrors.lost(index, self.sync, self.rollouts)
        self.turns.forget(index)
        if fault.kind == "leave":
            await self.run.leave(index)
        else:
            error = WorkerLost(f"rollout{index} died at {fault.at_s:g} s (simulated)")
            rollout.lose(error)
            await self.run.lost(index, error)

    # -- measures --------------------------------------------------------------------------------------------------

    def _mark(self) -> Mark:
        busy = {f"rollout{i}": self.recorder.busy.seconds(f"rollout{i}") for i in self.rollouts}
        busy |= {"trainer": self.trainer.busy_s, "reward": self.scorer.busy_s}
        busy |= {r.name: r.busy_s for r in self.references}
        exposed = {r.name: r.exposed_s for r in self.rollouts.values()}
        law = self.law
        at = asyncio.get_running_loop().time()
        return Mark(at, law.tokens + law.prompt_tokens, law.rows, busy, exposed, self.trainer.waited_s)

    def _step_done(self) -> None:
        self.marks.steps.append(self._mark())
        self.marks.oldest.append(self.law.take_oldest())

    def result(self, real_s: float) -> SimulationResult:
        config, marks = self.config, self.marks
        devices, window = config.cluster.devices, self.run.window
        first, last, skipped = marks.window(config.simulation.skip_steps)
        wall = max(last.at_s - first.at_s, 1e-12)
        rate = (last.tokens - first.tokens) / wall
        dry = marks.before_the_end(skipped, config.workflow.max_lag)
        span = max(dry.at_s - first.at_s, 1e-12)
        exposed = [(dry.exposed_s[n] - first.exposed_s[n]) / span for n in dry.exposed_s if n in first.exposed_s]
        times = marks.step_times()
        block, gap = blocks(self.trainer.spans, [m.at_s for m in marks.steps])
        measured = len(times) - skipped
        return SimulationResult(
            label=LABEL,
            devices=devices,
            steps=len(times),
            skipped=skipped,
            tokens_per_s=rate,
            tokens_per_s_per_device=rate / devices,
            samples_per_s=(last.rows - first.rows) / wall,
            step_s=wall / measured,
            step_times_s=times,
            idle=idle_of(first, dry),
            lag_histogram=dict(sorted(self.law.lags.items())),
            oldest_by_step=marks.oldest,
            load_s=next((r.load_s for r in self.rollouts.values()), 0.0),
            rollout_exposed_share=float(np.mean(exposed)) if exposed else 0.0,
            publish_wait_s=(last.waited_s - first.waited_s) / measured,
            train_block_s=block,
            train_gap_s=gap,
            issued=window.issued,
            trained=window.trained,
            open=window.open,
            dropped={reason: n for reason, n in window.dropped.items() if n},
            violations=dict(self.law.violations) | self._lost_rows(),
            turns=self.turns.count,
            real_s=real_s,
            note=self.recorder.note,
        )

    def _lost_rows(self) -> dict[str, int]:
        """Every row that was issued is trained, dropped with a reason, or still in the dock."""
        rows = self.dock.part.rows  # those on their way out have served, their claims have not ended
        missing = self.run.window.open - (rows.count - rows.doomed_count)
        return {"neither trained nor dropped nor there": missing} if missing else {}


async def _save_nothing(step: int, last: bool = False) -> None:
    return None
