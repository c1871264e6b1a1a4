"""Step times without simulation: bounds that no schedule beats, and an expectation to order candidates by. Pure.

Bounds count only work that must be done (every token decoded and trained once, the longest answer token by token, the
chain from a version to the batch that max_lag makes wait for it), so that a candidate whose bound is above a simulated
step time can be left out without simulating it. The expectation adds what loops do: a replica answers its share of a
batch before it takes the next one, so it waits for its longest answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one step."""

    step_s: float
    train_s: float  # the trainer computes, optimizer included
    generate_s: float  # a replica computes
    limit: str  # what the step waits for, in words

    def together_s(self, max_lag: int) -> float:
        """How long both sides compute at a time: without lag no longer than they must to end in time, since training
        waits for answers; with lag as chance has it."""
        if max_lag == 0:
            return max(0.0, self.train_s + self.generate_s - self.step_s)
        return self.train_s * self.generate_s / self.step_s

    @property
    def idle(self) -> dict[str, float]:
        """Share of the step in which a side does nothing."""
        return {"trainer": 1 - self.train_s / self.step_s, "rollout": 1 - self.generate_s / self.step_s}


def train_work_s(config: Config, costs: Costs, workload: Workload, chunks: int = 1) -> float:
    """Forward and backward of one step in `chunks` equal claims; chunks = 1 is the least there can be."""
    t = config.trainer
    tokens, squares = (workload.samples * x / t.data_parallel for x in (workload.sample_tokens, workload.sample_square))
    least = tokens / t.micro_batch_tokens
    micro = max(1.0, least / chunks) if chunks == 1 else max(1, math.ceil(least / chunks))
    return float(chunks * costs.train_s(tokens / chunks, squares / chunks, micro))


def active_replicas(config: Config, workload: Workload) -> int:
    """Replicas that have something to do: groups under way are dealt out whole."""
    return min(config.rollout.replicas, workload.groups_per_step * (config.workflow.max_lag + 1))


def groups_per_call(config: Config, workload: Workload) -> int:
    """Most groups that a replica answers in one call (`workflow/answering.py`)."""
    share = math.ceil(workload.groups_per_step / config.rollout.replicas)
    if config.workflow.max_lag == 0:
        return share
    return min(share, max(1, config.rollout.max_running // workload.group_size))


def waits_for_longest(config: Config) -> bool:
    """A replica takes nothing new before the longest answer of its call is complete."""
    w = config.workflow
    return w.lanes == 1 and w.repack_below == 0 and w.partial_rounds is None


def calls_s(config: Config, costs: Costs, workload: Workload) -> float:
    """Expected time of the calls that a replica answers per step, each one until its longest answer ends."""
    groups = groups_per_call(config, workload)
    call = generation_s(costs, workload, groups * workload.group_size, config.rollout.max_running)
    return call * workload.groups_per_step / (groups * active_replicas(config, workload))


def decode_work_s(config: Config, costs: Costs, workload: Workload) -> float:
    """Least time of a replica for its share of a step. Where it waits for the longest answer of a call, full calls
    waste least; else every step of decoding is as full as `rollout.max_running` allows."""
    share = workload.samples / active_replicas(config, workload)
    running = float(config.rollout.max_running)
    tokens = share * workload.answer.mean
    # Sum over answers of the context at each of their tokens: prompt x length + length (length - 1) / 2.
    context = share * workload.answer.mean * (workload.prompt.mean + (workload.answer.biased_mean - 1) / 2)
    full = float(costs.decode_s(running, 0.0) * tokens / running + costs.decode_context_s * context)
    if waits_for_longest(config) and groups_per_call(config, workload) * workload.group_size <= running:
        return max(full, calls_s(config, costs, workload))
    return full


def longest_alone_s(costs: Costs, workload: Workload, quantile: float = 0.5) -> float:
    """Least time of the longest answer of a step, generated as the only one; by the median over steps of its length."""
    length = workload.answer.quantile(quantile ** (1 / workload.samples))
    return float(length * costs.decode_s(1.0, workload.prompt.mean + (length - 1) / 2))


@dataclass(frozen=True, slots=True)
class Least:
    """What no schedule saves one side of a step, in seconds: all of its work, and what nothing can be done beside."""

    work_s: float  # trainer: without the optimizer
    alone_s: float  # trainer: the optimizer; rollout: loading weights
    published_s: float = 0.0
    longest_s: float = 0.0  # rollout: the longest answer; 0 where no step has to wait for it
    turn_s: float = 0.0  # trainer: giving the devices and taking them back
    reference_s: float = 0.0  # kept with the trainer: forward passes of the frozen policy on its own devices


def reference_s(config: Config, costs: Costs, workload: Workload) -> float:
    """Forward passes of a step on each device of the reference policy; 0 without one."""
    if config.algorithm.kl_coef == 0 or config.workflow.schedule == "colocated":
        return 0.0
    all_of_it = costs.forward_s(workload.step_tokens, workload.samples * workload.sample_square)
    return float(all_of_it) / (config.simulation.references * config.simulation.reference_devices)


def least_of_trainer(config: Config, costs: Costs, workload: Workload) -> Least:
    turn = costs.give_s + costs.take_s
    work = train_work_s(config, costs, workload)
    reference = reference_s(config, costs, workload)
    return Least(work, costs.optimizer_s, published_s=costs.publish_s, turn_s=turn, reference_s=reference)


def least_of_rollout(config: Config, costs: Costs, workload: Workload) -> Least:
    w = config.workflow
    waits = w.take == "issued" and w.partial_rounds is None and w.oversample == 1
    longest = longest_alone_s(costs, workload) if waits else 0.0
    return Least(decode_work_s(config, costs, workload), costs.load_s, longest)


def step_bound_s(config: Config, trainer: Least, rollout: Least) -> float:
    """No schedule of these loops has a shorter step on average over steps (lengths at their expectation)."""
    lag, decode = config.workflow.max_lag, max(rollout.work_s, rollout.longest_s)
    train = trainer.work_s + trainer.alone_s
    if config.workflow.schedule == "colocated":
        return train + (decode + trainer.turn_s if lag == 0 else rollout.work_s)
    fresh = trainer.published_s + rollout.alone_s
    if not config.workflow.overlap:
        return decode + train + fresh
    if lag == 0:  # the first answers can be trained while the last are generated
        return max(decode, trainer.work_s, trainer.reference_s) + trainer.alone_s + fresh
    # Batch v + lag waits for version v: it is generated, trained, and makes version v + lag + 1.
    return max(train, rollout.work_s, trainer.reference_s, (rollout.longest_s + trainer.alone_s + fresh) / (lag + 1))


def generation_s(costs: Costs, workload: Workload, samples: float, slots: int) -> float:
    """Expected time of one replica for `samples` answers claimed at once, `slots` of them running at a time, until the
    last one ends."""
    if samples <= 0:
        return 0.0
    last = min(samples, float(slots))
    first = samples - last  # these run while all slots are taken
    prefill = costs.prefill_s(samples * workload.prompt.mean, samples * workload.prompt.mean_square)
    context = workload.prompt.mean + (workload.answer.biased_mean - 1) / 2
    full = first * workload.answer.mean / slots * costs.decode_s(float(slots), slots * context)
    lengths = workload.answer
    ends = lengths.tokens.astype(np.float64)
    steps = np.diff(ends, prepend=0.0)
    alive = np.cumsum(lengths.share[::-1])[::-1]  # share of answers that reach this length
    some = 1.0 - np.maximum(1.0 - alive, 0.0) ** last  # chance that any does
    running = np.where(some > 0, last * alive / np.maximum(some, 1e-300), 1.0)
    each = costs.decode_s(running, running * (workload.prompt.mean + ends - (steps + 1) / 2))
    return float(prefill + full + np.sum(steps * some * each))


def estimate(config: Config, costs: Costs, workload: Workload) -> Estimate:
    """The expected step of the configured schedule in the steady state."""
    w, r = config.workflow, config.rollout
    chunk = config.trainer.stream_groups or max(1, w.groups_per_step // 4)
    chunks = math.ceil(w.groups_per_step / chunk) if w.overlap else 1
    train = train_work_s(config, costs, workload, chunks) + costs.optimizer_s
    samples = groups_per_call(config, workload) * workload.group_size
    generate = generation_s(costs, workload, samples, r.max_running)
    score = costs.score_s(workload.samples / chunks)
    fresh = costs.publish_s + costs.fetch_s + costs.load_s
    if w.schedule == "colocated":
        step = generate + score + train + costs.give_s + costs.take_s
        return Estimate(step, train, generate, "both sides in turn")
    if not w.overlap:
        return Estimate(generate + score + train + fresh, train, generate, "one task at a time")
    if w.max_lag == 0:
        # A group can be trained when its longest answer ends: beside what the longest answer of all takes beyond that.
        answer = workload.answer
        beside = generate * (1 - answer.longest_of(workload.group_size) / answer.longest_of(samples))
        work = train - costs.optimizer_s
        step = generate + max(work / chunks, work - beside) + score + costs.optimizer_s + fresh
        return Estimate(step, train, generate, "generation, then the last chunk of training and new weights")
    per_step = calls_s(config, costs, workload)
    chain = (generate + score + train / chunks + costs.optimizer_s + fresh) / (w.max_lag + 1)
    limits = {
        "training": train,
        "generation": per_step + costs.load_s,
        "the reference": reference_s(config, costs, workload),
        "the way from a version to the batch that max_lag makes wait for it": chain,
    }
    limit = max(limits, key=lambda name: limits[name])
    return Estimate(limits[limit], train, min(per_step, limits[limit]), limit)
