"""Turns what the loops report into metrics, samples, progress and the summary. Changes nothing in the run."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import psutil

from mindspeed_asyncflow.algorithms.aggregate import loss_denominator
from mindspeed_asyncflow.config.feasibility import devices
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.describe import waiting_rows
from mindspeed_asyncflow.observe.bottleneck import LEAST_STEPS, Sizes, bottleneck, whole_run
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.observe.metrics import describe, explained_variance, reduce_sums
from mindspeed_asyncflow.observe.progress import Progress
from mindspeed_asyncflow.observe.trace import get_tracer
from mindspeed_asyncflow.observe.writers import MetricsWriter, SamplesWriter, SampleText
from mindspeed_asyncflow.workflow.book import StepBook
from mindspeed_asyncflow.workflow.busy import BusyClock
from mindspeed_asyncflow.workflow.conversing import Tally
from mindspeed_asyncflow.workflow.score_worker import ScoreReport
from mindspeed_asyncflow.workflow.staleness import StalenessWindow
from mindspeed_asyncflow.workflow.train_worker import ChunkReport, FinishReport
from mindspeed_asyncflow.workflow.turns import Turns
from mindspeed_asyncflow.workflow.verdict import Verdict, of_run, verdict_of
from mindspeed_asyncflow.workflow.weight_sync import WeightSync
from mindspeed_asyncflow.workflow.workers import RolloutReport

# What a run that goes on needs of the steps before, and of the part of a step that lies before its checkpoint.
KEPT = (
    *("last_step_s", "rewards", "steps", "skipped", "note", "masked_tokens", "_trained_tokens", "_step_rewards"),
    *("_scores", "_zero_std", "_lag_oldest", "_lag_newest", "_abstained", "_unfinished", "_masked_tokens"),
    *("_masked_rows", "_generated_tokens", "_tokens", "_pending_eval", "_critic"),
)


class StepRecorder:
    """Lives in the driver. One instance per run."""

    def __init__(
        self,
        config: Config,
        metrics: MetricsWriter,
        samples: SamplesWriter,
        progress: Progress,
        decode: Callable[[np.ndarray], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is that of the event loop that the run lives in."""
        self.clock = clock
        self.config, self.metrics, self.samples, self.progress, self.decode = config, metrics, samples, progress, decode
        self.busy = BusyClock(clock)
        self.sides = ["trainer", *(f"rollout{i}" for i in range(config.rollout.replicas))]  # those that are there
        self.last_step_s = 0.0
        self.rewards: list[float] = []  # mean of each step that trained anything
        self.steps = 0
        self.lags: Counter[int] = Counter()
        self.skipped = 0
        self.verdicts: list[Verdict] = []  # of all evaluations, in order
        self.note: str = ""
        self._parts: list[Mapping[str, float]] = []
        self._times: defaultdict[str, float] = defaultdict(float)
        self._step_rewards: list[float] = []
        self._scores: list[float] = []  # of answers that were scored in this step
        self._of_scorers: defaultdict[str, list[float]] = defaultdict(list)
        self._talked = Tally()
        self._zero_std: list[bool] = []
        self._lag_oldest: list[int] = []
        self._lag_newest: list[int] = []
        self._abstained = self._unfinished = self._masked_tokens = self._masked_rows = 0
        self.masked_tokens = 0  # of the whole run
        self._generated_tokens = self._tokens = self._trained_tokens = 0
        self._loop_s = 0.0  # that the loops ran before this process
        self.before = 0  # steps made by processes before this one
        self.begin()
        self.end()
        self._pending_eval: dict[str, float] = {}
        self._critic: dict[str, float] = {}
        self._recent: deque[str] = deque(maxlen=50)
        self._unscored: list[float] = []  # waiting for a score at the end of each step of this process

    def begin(self) -> None:
        """The loops start now; idle shares and throughput count from here."""
        self.started = self._mark = self.clock()
        self.started_busy = {s: self.busy.seconds(s) for s in self.sides}
        self._busy_mark = dict(self.started_busy)
        self._there = dict.fromkeys(self.sides, self.started)  # since when each side counts
        # End of the last step beside which replicas had work, and how long each side had worked by then.
        self._fed: tuple[float, dict[str, float]] = self.started, {}

    def end(self) -> None:
        """The loops have ended; evaluation and saving do not count any more."""
        self.ended = self.clock()

    def joined(self, side: str) -> None:
        """A replica that was not there from the beginning counts from now on."""
        if side not in self.sides:
            self.sides.append(side)
        self._busy_mark[side] = self.started_busy[side] = self.busy.seconds(side)
        self._there[side] = self.clock()

    def left(self, side: str) -> None:
        """A replica is gone; its idle time counts no more."""
        if side in self.sides:
            self.sides.remove(side)

    def generated(self, report: RolloutReport) -> None:
        self._generated_tokens += report.tokens
        self._unfinished += len(report.unfinished)
        if report.conversations is not None:
            self._talked.add(report.conversations)
        self._times["gen"] = max(self._times["gen"], report.busy_s)

    def scored(self, report: ScoreReport) -> None:
        self._times["reward"] = max(self._times["reward"], report.busy_s)
        self._abstained += len(report.unscored)
        self._scores += [score for score in report.scores if not math.isnan(score)]
        for name, values in report.parts.items():
            self._of_scorers[name] += values
        self.progress.inside(len(self._scores), len(self._step_rewards))
        for row, why in report.unscored.items():
            if why not in self._recent:
                self._recent.append(why)
                get_logger("reward").warning("answer of row %d has no score: %s", row, why)

    def referenced(self, busy_s: float) -> None:
        self._times["reference"] = max(self._times["reference"], busy_s)

    def valued(self, busy_s: float) -> None:
        self._times["values"] += busy_s

    def critic_trained(self, reports: Sequence[ChunkReport]) -> None:
        """One of every replica of the critic; none without a critic."""
        self._parts += [r.sums for r in reports]

    def critic_finished(self, report: FinishReport | None) -> None:
        """The critic's optimizer step of the running step."""
        if report is not None:
            self._critic = {"critic/grad_norm": report.optim.grad_norm, "critic/lr": report.optim.lr}

    def trained(self, step: int, claim: Any, rewards: np.ndarray, reports: Sequence[ChunkReport], issues: Any) -> None:
        """A chunk was trained at version `step`; `rewards` of its rows, float64 [n]; `issues`: (epoch, index)."""
        self._parts += [r.sums for r in reports]
        self._times["forward_backward"] += max(r.busy_s for r in reports)
        self._step_rewards += rewards.tolist()
        self.progress.inside(len(self._scores), len(self._step_rewards))
        for group in np.unique(claim.group_ids):
            of_group = rewards[claim.group_ids == group]
            alone = self.config.algorithm.group_size == 1  # has nothing to differ from
            self._zero_std.append(not alone and bool(of_group.max() == of_group.min()))
        oldest = {row: version for r in reports for row, version in r.oldest_trained.items()}
        newest = dict(zip(claim.rows.tolist(), claim.version_max.tolist()))
        self._lag_oldest += [step - version for version in oldest.values()]
        self._lag_newest += [step - newest[row] for row in oldest]
        self._masked_tokens += sum(r.masked_tokens for r in reports)
        self._masked_rows += len(newest) - len(oldest)
        self._tokens += int(claim.tokens.sum())
        by_row = dict(zip(claim.rows.tolist(), rewards.tolist()))
        for row, prompt, answer, truth, version in (s for r in reports for s in r.samples):
            texts = (self.decode(prompt), self.decode(answer), by_row[row], truth)
            self.samples.write(step, SampleText(version, *texts, step - version, issues[row]))

    async def step_done(
        self,
        step: int,
        finish: Sequence[FinishReport],
        window: StalenessWindow,
        book: StepBook,
        sync: WeightSync,
        stats: Mapping[str, Any],
        turns: Turns,
    ) -> None:
        """Write the step's metrics and move the marks."""
        now = self.clock()
        wall = self.last_step_s = now - self._mark
        optim = finish[0].optim
        self.skipped += not optim.applied and not self._only_critic(step)
        self.steps += 1
        if self._step_rewards:  # a step whose answers all went without a score has none
            self.rewards.append(float(np.mean(self._step_rewards)))
        self.lags.update(self._lag_oldest)
        self.masked_tokens += self._masked_tokens
        self._trained_tokens += self._tokens
        metrics = reduce_sums([*self._parts, self._sample_parts()] if self._step_rewards else self._parts)
        metrics |= self._loss(metrics) | self._critic | explained_variance(metrics)
        self._times["update_weights"] = sync.step_still_s
        if turns.count:
            self._times |= {"give": turns.give_s, "take_back": turns.take_s}
        metrics |= self._reward_metrics() | self._times_of(finish, wall)
        metrics |= {
            "actor/grad_norm": optim.grad_norm,
            "actor/lr": optim.lr,
            "train/skipped_steps": self.skipped,
            "perf/samples_per_s": len(self._step_rewards) / wall,
            "perf/tokens_per_s": self._tokens / wall,
            "perf/tokens_per_s_per_device": self._tokens / wall / devices(self.config),
            "perf/gen_tokens_per_s": self._generated_tokens / wall,
            "perf/host_memory_bytes": float(psutil.virtual_memory().used),
            "weight_sync/publish_s": sync.publish_s,
            "weight_sync/publish_exposed_s": max(f.waited_s for f in finish),
            "weight_sync/version": sync.oldest_served,
            "weight_sync/behind_max": sync.step_behind,
            "weight_sync/probe_gap_max": sync.step_gap,
            "weight_sync/load_s": sync.step_load_s,
            "weight_sync/fetch_s": sync.arrivals.step_fetch_s,
            "weight_sync/saved_share": sync.arrivals.step_saved,
            "weight_sync/bytes": sync.table.slot_bytes,
            "weight_sync/unchanged_share": sync.unchanged_share,
            "data/epoch": book.epoch,
            "samples/issued": window.issued,
            "samples/trained": window.trained,
            "samples/dropped": sum(window.dropped.values()),
            "samples/dropped_stale": window.dropped["stale"],
            "samples/dropped_reward": window.dropped["unscored"],
            "samples/dropped_flat": window.dropped["zero_variance"],
            "samples/dropped_surplus": window.dropped["surplus"],
            "samples/unfinished": self._unfinished,
            "samples/masked": self._masked_rows,
            "staleness/masked_tokens": self._masked_tokens,
            "samples/open": window.open,
        }
        waiting = waiting_rows(stats)
        get_tracer().counter("dock: rows that wait", **waiting)
        get_tracer().counter("versions behind", **{f"rollout{i}": n for i, n in enumerate(sync.behind())})
        metrics |= self._idle(wall) | {f"queue/{task}": float(n) for task, n in waiting.items()}
        metrics |= dock_gauges(stats) | self._pending_eval
        self._unscored.append(metrics.get("queue/reward", 0.0))
        if self.config.turns.environment is not None:
            metrics |= describe("num_turns", self._talked.turns) | self._talked.counts()
        sync.new_step()
        self.metrics.write(step, metrics)
        self.progress.step(step, metrics)
        self._reset(now)
        # In the last `max_lag` steps no prompts are left to answer.
        if not self._fed[1] or self.steps + self.config.workflow.max_lag <= self.config.trainer.steps:
            self._fed = now, dict(self._busy_mark)

    def _sample_parts(self) -> dict[str, float]:
        return {
            "groups_count": len(self._zero_std),
            "reward/zero_std_fraction_sum": sum(self._zero_std),
            "staleness_sum": sum(self._lag_newest),
            "staleness/max": max(self._lag_newest, default=0),
            "staleness/worst_sum": sum(self._lag_oldest),
            "staleness/worst_max": max(self._lag_oldest, default=0),
            "staleness/version_span_sum": sum(o - n + 1 for o, n in zip(self._lag_oldest, self._lag_newest)),
            "staleness/version_span_max": max(
                (o - n + 1 for o, n in zip(self._lag_oldest, self._lag_newest)), default=0
            ),
        }

    def _only_critic(self, step: int) -> bool:
        """Whether the policy was not meant to learn."""
        return bool(self._critic) and step < self.config.critic.warmup_steps

    def _loss(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The number whose gradient was taken; none where nothing was trained."""
        a, total = self.config.algorithm, metrics.get("actor/loss_sum")
        if total is None:
            return {}
        counted = metrics["actor/loss_tokens_count"], metrics["actor/loss_sequences_count"]
        return {"actor/loss": total / loss_denominator(a.aggregation, *counted, a.loss_horizon)}

    def _reward_metrics(self) -> dict[str, float]:
        asked = max(1, len(self._step_rewards) + self._abstained)
        of_scorers = {f"scorer/{name}": float(np.mean(values)) for name, values in self._of_scorers.items()}
        return (
            describe("reward", self._step_rewards)
            | describe("score", self._scores)
            | of_scorers
            | {
                "reward/std": float(np.std(self._step_rewards)) if self._step_rewards else float("nan"),
                "reward/abstained_fraction": self._abstained / asked,
            }
        )

    def _times_of(self, finish: Sequence[FinishReport], wall: float) -> dict[str, float]:
        times = {f"timing_s/{name}": float(value) for name, value in self._times.items()}
        return times | {"timing_s/step": wall, "timing_s/optim_step": max(f.busy_s - f.waited_s for f in finish)}

    def _idle(self, wall: float) -> dict[str, float]:
        busy = {s: self.busy.seconds(s) - self._busy_mark[s] for s in self.sides}
        rollout = [busy[s] for s in self.sides if s != "trainer"]
        return {
            "idle/trainer": max(0.0, 1 - busy["trainer"] / wall),
            "idle/rollout": max(0.0, 1 - sum(rollout) / max(1, len(rollout)) / wall),
        }

    def _reset(self, now: float) -> None:
        self._mark = now
        self._busy_mark = {s: self.busy.seconds(s) for s in self.sides}
        self._parts, self._step_rewards, self._zero_std = [], [], []
        self._lag_oldest, self._lag_newest, self._scores = [], [], []
        self._of_scorers.clear()
        self._talked = Tally()
        self._times.clear()
        self._abstained = self._unfinished = self._masked_tokens = self._masked_rows = 0
        self._generated_tokens = self._tokens = 0
        self._pending_eval, self._critic = {}, {}

    def evaluated(self, verdict: Verdict) -> None:
        """An evaluation ended; its metrics go with the next step that does."""
        self.verdicts.append(verdict)
        self._pending_eval = verdict.metrics()
        self.progress.evaluated(self._pending_eval)

    def data_ended(self, step: int) -> None:
        by_client = self.config.service.prompts == "client"
        what = "the client's prompts end" if by_client else "data ends"
        keys = "trainer.steps" if by_client else "data.epochs, trainer.steps"
        self._note(f"{what} after {step} steps ({keys} asked for {self.config.trainer.steps})")

    def data_short(self, step: int) -> None:
        """Groups that `step` lost cannot be replaced: there are no prompts any more."""
        if not self.note:
            by_client = self.config.service.prompts == "client"
            why, key = ("the client had no prompts waiting", "") if by_client else ("the data ended", " (data.epochs)")
            self._note(f"{why}: from step {step + 1} on dropped groups were not replaced{key}")

    def _note(self, said: str) -> None:
        """Something about the data that the summary says too."""
        self.note = "; ".join(filter(None, (self.note, said)))
        get_logger("data").warning(said)

    def summary(self, window: StalenessWindow, sync: WeightSync, wall_s: float, error: str = "") -> dict[str, Any]:
        """What `summary.json` holds; `reward_last` is the mean of the last ten steps."""
        loop_s = self._loop_s + self.ended - self.started
        last = self.rewards[-10:]
        fed, busy = self._fed
        for_s = {s: fed - self._there[s] for s in self.sides if s in busy and self._there[s] < fed}
        idle = {s: max(0.0, 1 - (busy[s] - self.started_busy[s]) / for_s[s]) for s in for_s}
        waits = whole_run(idle, self._unscored) if idle else {}
        enough = len(self._unscored) >= LEAST_STEPS
        return {
            "task": self.config.data.task,
            "model": self.config.model.source,
            "reward_first": self.rewards[0] if self.rewards else None,
            "reward_last": float(np.mean(last)) if last else None,
            **of_run(self.verdicts, window.version),
            "steps": self.steps,
            "steps_before": self.before,
            "wall_s": round(wall_s, 2),
            "loop_s": round(loop_s, 3),
            "max_lag": max(self.lags, default=0),
            "lag_histogram": {str(k): v for k, v in sorted(self.lags.items())},
            "samples_issued": window.issued,
            "samples_trained": window.trained,
            "samples_dropped": sum(window.dropped.values()),
            "samples_open": window.open,
            "dropped_by_reason": dict(window.dropped),
            "tokens_masked": self.masked_tokens,
            "skipped_steps": self.skipped,
            "samples_per_s": window.trained / loop_s if self.steps else None,
            "tokens_per_s": self._trained_tokens / loop_s if self.steps else None,
            "trainer_idle_share": waits.get("idle/trainer"),
            "rollout_idle_share": waits.get("idle/rollout"),
            "bottleneck": bottleneck(waits, Sizes.of(self.config)) if enough else "",
            "rollout_train_logprob_gap_max": sync.gap_max,
            "rollout_train_logprob_gap_limit": sync.limit,
            "dtype": self.config.model.dtype,
            "note": self.note,
            "error": error,
        }

    def state(self) -> dict[str, Any]:
        """As JSON values, between two steps."""
        kept = {name: getattr(self, name) for name in KEPT}
        sums = {"lags": list(self.lags.items()), "times": dict(self._times), "of_scorers": dict(self._of_scorers)}
        told = {"talked": asdict(self._talked), "verdicts": [asdict(v) for v in self.verdicts]}
        return kept | sums | told | {"loop_s": self._loop_s + self.clock() - self.started}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state()` was taken; `begin` follows."""
        for name in KEPT:
            setattr(self, name, state[name])
        self.before = self.before if self._unscored else self.steps  # the trainer alone may come back, too
        self.lags = Counter({lag: count for lag, count in state["lags"]})
        self._times, self._of_scorers = defaultdict(float, state["times"]), defaultdict(list, state["of_scorers"])
        self._talked, self.verdicts = Tally(**state["talked"]), [verdict_of(v) for v in state["verdicts"]]
        self._loop_s, self._parts = state["loop_s"], []
        self.progress.resumed(self.steps)


def dock_gauges(stats: Mapping[str, Any]) -> dict[str, float]:
    """How full the dock is, and what its waits and redeliveries have come to."""
    return {
        "dock/used_ratio": stats["used_bytes"] / stats["arena_bytes"],
        "dock/back_pressure_s": stats["back_pressure_s"],
        "dock/redelivered": sum(task["rows_redelivered"] for task in stats["tasks"].values()),
        "dock/served_by_other_pairs": stats["peers"]["stolen_rows"],
    }
