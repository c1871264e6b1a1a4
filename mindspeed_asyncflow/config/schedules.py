"""Which settings of the workflow fit together: schedules, partial answers, oversampling, the pool of replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mindspeed_asyncflow.config.schema import Config

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]


def rules(c: Config) -> Iterator[Raw]:
    if c.workflow.schedule == "colocated":
        yield from _colocated(c)
    elif c.workflow.max_lag == 0 and c.workflow.update == "in_flight":
        yield (
            "warning",
            ("workflow.update", "workflow.max_lag"),
            "without lag no answer is under way when new weights come, so in_flight does what delayed does; "
            "set delayed",
        )
    yield from _lend(c)
    yield from _answers(c)
    yield from _groups(c)
    yield from _pool(c)


def _colocated(c: Config) -> Iterator[Raw]:
    w, r, ranks = c.workflow, c.rollout, c.trainer.world_size
    if w.max_lag:
        yield (
            "error",
            ("workflow.schedule", "workflow.max_lag"),
            f"colocated is on-policy: trainer and rollout take turns, so max_lag must be 0, not {w.max_lag}",
        )
    if w.update != "delayed":
        yield (
            "error",
            ("workflow.schedule", "workflow.update"),
            f"replicas that sleep between turns load at their turn, so update must be delayed, not {w.update}",
        )
    devices = r.replicas * r.tensor_parallel
    if r.engine == "reference" and (r.replicas != ranks or r.tensor_parallel != 1):
        yield (
            "error",
            ("workflow.schedule", "rollout.engine", "rollout.replicas", "rollout.tensor_parallel"),
            "colocated with engine reference, one process per device holds a trainer rank and a replica: set replicas "
            f"to {ranks} and tensor_parallel to 1, not {r.replicas} and {r.tensor_parallel}",
        )
    elif (r.engine == "vllm" or r.own) and devices != ranks:
        yield (
            "error",
            ("workflow.schedule", "rollout.replicas", "rollout.tensor_parallel"),
            f"colocated replicas share the {ranks} devices of the trainer: replicas x tensor_parallel must be {ranks}, "
            f"not {r.replicas} x {r.tensor_parallel}",
        )
    if r.min_replicas not in (None, r.replicas):
        yield (
            "error",
            ("workflow.schedule", "rollout.min_replicas"),
            f"colocated starts with all {r.replicas} replicas; leave min_replicas out",
        )


def _lend(c: Config) -> Iterator[Raw]:
    w, r, ranks = c.workflow, c.rollout, c.trainer.world_size
    if not w.lend:
        return
    if w.schedule == "colocated":
        yield (
            "error",
            ("workflow.lend", "workflow.schedule"),
            "colocated replicas are on the trainer's devices already; lend is for schedule separated",
        )
    elif w.max_lag == 0:
        yield (
            "error",
            ("workflow.lend", "workflow.max_lag"),
            "answers that the trainer interrupts go on with newer weights: lend needs max_lag 1 or more",
        )
    if ranks % r.tensor_parallel:
        yield (
            "error",
            ("workflow.lend", "rollout.tensor_parallel"),
            f"lent replicas cover the {ranks} devices of the trainer, and {r.tensor_parallel} does not divide that; "
            "take a divisor",
        )


def _answers(c: Config) -> Iterator[Raw]:
    w, r = c.workflow, c.rollout
    for key, used in (("partial_rounds", w.partial_rounds), ("repack_below", w.repack_below)):
        if used and w.max_lag == 0:
            yield (
                "error",
                (f"workflow.{key}", "workflow.max_lag"),
                f"{key} lets answers go on later or elsewhere, which is not on-policy: it needs max_lag 1 or more",
            )
    if w.partial_rounds and w.partial_rounds > r.max_new_tokens:
        yield (
            "error",
            ("workflow.partial_rounds", "rollout.max_new_tokens"),
            f"{w.partial_rounds} rounds have less than one of {r.max_new_tokens} tokens each; lower it",
        )
    if w.partial_rounds and w.stale == "drop" and 0 < w.max_lag < w.partial_rounds - 1:
        yield (
            "warning",
            ("workflow.partial_rounds", "workflow.max_lag", "workflow.stale"),
            f"an answer of {w.partial_rounds} rounds may span as many versions; with max_lag {w.max_lag} it is dropped "
            f"and asked again: set max_lag to {w.partial_rounds - 1}, or stale to mask",
        )
    if w.repack_below >= r.max_running:
        yield (
            "error",
            ("workflow.repack_below", "rollout.max_running"),
            f"a replica with {w.repack_below} answers left is as full as one may be ({r.max_running}); lower it",
        )
    if w.repack_below and r.replicas < 2:
        yield (
            "error",
            ("workflow.repack_below", "rollout.replicas"),
            "there is no second replica to hand answers to; set it to 0",
        )
    if w.lanes > 1 and w.update != "in_flight":
        yield (
            "error",
            ("workflow.lanes", "workflow.update"),
            f"{w.lanes} lanes never end together, so there is no boundary to load at; set update to in_flight",
        )
    if w.lanes > 1 and w.max_lag == 0:
        yield (
            "error",
            ("workflow.lanes", "workflow.max_lag"),
            "without lag a replica gets its share of a batch as one call; lanes need max_lag 1 or more",
        )
    if w.stale == "mask" and w.max_lag == 0:
        yield (
            "error",
            ("workflow.stale", "workflow.max_lag"),
            "without lag no answer has tokens of several versions; mask needs max_lag 1 or more",
        )


def _groups(c: Config) -> Iterator[Raw]:
    w, groups = c.workflow, c.workflow.groups_per_step
    if w.take == "ready" and w.max_lag == 0:
        yield (
            "error",
            ("workflow.take", "workflow.max_lag"),
            "without lag a step can train nothing but what was issued for it; ready needs max_lag 1 or more",
        )
    if w.oversample > 1 and -int(-groups * w.oversample // 1) == groups:
        yield (
            "warning",
            ("workflow.oversample", "workflow.groups_per_step"),
            f"{w.oversample:g} x {groups} groups is not one group more; raise it, or set it to 1",
        )
    if w.oversample > 1 and not w.overlap:
        yield (
            "error",
            ("workflow.oversample", "workflow.overlap"),
            "one task at a time waits for every answer, so a step has no surplus; set overlap to true",
        )
    if c.algorithm.dynamic_sampling and w.max_refills == 0 and w.oversample == 1:
        yield (
            "warning",
            ("algorithm.dynamic_sampling", "workflow.max_refills", "workflow.oversample"),
            "dropped groups are never replaced: every step that has some goes short; set max_refills to 1 or more",
        )


def _pool(c: Config) -> Iterator[Raw]:
    r, w = c.rollout, c.workflow
    if r.min_replicas is not None and r.min_replicas > r.replicas:
        yield (
            "error",
            ("rollout.min_replicas", "rollout.replicas"),
            f"the run would wait for {r.min_replicas} of {r.replicas} replicas; lower min_replicas",
        )
    elif r.min_replicas not in (None, r.replicas) and w.max_lag == 0:
        yield (
            "error",
            ("rollout.min_replicas", "workflow.max_lag"),
            "without lag the shares of a batch are fixed by the number of replicas, so that a seed repeats a run; "
            "leave min_replicas out",
        )
