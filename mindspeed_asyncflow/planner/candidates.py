"""All ways to use the devices that a model, its memory and the batch allow, each side by itself. Pure.

Every way that is left out has a reason, counted by kind: `divisibility` (sizes that do not cut the model, the batch or
the node), `memory` (the fullest device does not hold it), `devices` (nothing is left for the other side).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel, check_rollout, check_train
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner import memory
from mindspeed_asyncflow.planner.work import Work, stage_split
from mindspeed_asyncflow.planner.workload import Workload

MAX_RUNNING = 1024  # answers of one replica at a time; beyond, sampling on the host limits
RECOMPUTE = (False, True)


@dataclass(frozen=True)
class Side:
    """One way to use devices for one side, as a whole configuration with the other side left as it was."""

    config: Config
    devices: int
    memory: dict[str, float]


def changed(config: Config, section: str, **values: Any) -> Config:
    """`config` with some settings of one section replaced, without validation: the caller knows the ranges."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def with_references(config: Config, work: Work, devices: int) -> list[Config]:
    """Ways to hold the reference policy, where there is one: few copies, of a node at most where the model fits there.

    Its forward passes are a quarter to a third of what training computes, so that more than a quarter of all devices is
    never needed. Few copies: each claims what is ready, and one that takes much lets others wait.
    """
    if config.algorithm.kl_coef == 0 or config.workflow.schedule == "colocated":
        return [config]
    size = 1
    while work.parameters * memory.WIDTH[config.model.dtype] / size > memory.usable_bytes(config) and size < devices:
        size *= 2
    per_node = config.cluster.device.devices_per_node
    ways = set()
    for part in (devices, 16, 8, 4):
        count = max(size, devices // part)
        each = max(size, min(per_node, count))
        ways.add((count // each, each))
    return [changed(config, "simulation", references=n, reference_devices=each) for n, each in sorted(ways)]


class Candidates:
    """Both sides of `config` for `devices` devices."""

    def __init__(self, config: Config, work: Work, workload: Workload, devices: int) -> None:
        self.config, self.work, self.workload, self.devices = config, work, workload, devices
        self.per_node = config.cluster.device.devices_per_node
        self.rejected: Counter[str] = Counter()
        self.usable = memory.usable_bytes(config)

    @property
    def reference_devices(self) -> int:
        """Frozen copies have devices of their own, but where all tasks take turns."""
        s = self.config.simulation
        return s.references * s.reference_devices if self.config.algorithm.kl_coef > 0 and not self.shared else 0

    @property
    def shared(self) -> bool:
        """Trainer and rollout take turns on the same devices."""
        return self.config.workflow.schedule == "colocated"

    @cached_property
    def tensor_sizes(self) -> list[int]:
        """Powers of two up to the model's attention heads; what is illegal for a side falls out there."""
        return [1 << n for n in range(self.work.shape.heads.bit_length()) if 1 << n <= self.devices]

    # ---- the trainer -------------------------------------------------------------------------------------------------

    def trainers(self) -> Iterator[Side]:
        for parallel in self._train_cuts():
            for data in divisors(self.config.workflow.groups_per_step):
                yield from self._train_sides(parallel, data)

    def _train_cuts(self) -> Iterator[dict[str, Any]]:
        """Model-parallel sizes that cut the model."""
        shape = self.work.shape
        for tensor in self.tensor_sizes:
            try:
                check_train(shape, TrainParallel(tensor=tensor))
            except ConfigError:
                self.rejected["divisibility"] += 1
                continue
            for context in (1, 2, 4, 8):
                if shape.heads // tensor % context:
                    self.rejected["divisibility"] += 1
                elif tensor * context <= self.devices:
                    yield from self._pipelines(tensor, context)

    def _pipelines(self, tensor: int, context: int) -> Iterator[dict[str, Any]]:
        layers = self.work.shape.layers
        for stages in divisors(layers) + [n for n in (2, 4, 8, 16, 32) if layers % n and n < layers]:
            if tensor * context * stages > self.devices:
                self.rejected["devices"] += 1
                continue
            sizes: dict[str, Any] = dict(tensor_parallel=tensor, context_parallel=context, pipeline_parallel=stages)
            sizes |= dict(sequence_parallel=tensor > 1, virtual_pipeline=None, pipeline_layers=None)
            if stages == 1:
                yield sizes
                continue
            best = stage_split(self.work, stages)
            even = layers % stages == 0
            if even:
                yield sizes
                if layers // stages % 2 == 0:
                    yield sizes | {"virtual_pipeline": 2}
            if not even or best != (layers // stages,) * stages:
                yield sizes | {"pipeline_layers": list(best)}

    def _train_sides(self, sizes: dict[str, Any], data: int) -> Iterator[Side]:
        ranks = sizes["context_parallel"] * data
        devices = ranks * sizes["tensor_parallel"] * sizes["pipeline_parallel"]
        left = self.devices - self.reference_devices - (0 if self.shared else 1)
        if devices > left or (self.shared and devices != left):
            self.rejected["devices"] += 1
            return
        for expert in self._expert_sizes(ranks):
            for recompute in RECOMPUTE:
                yield from self._micro_batches(sizes, data, expert, recompute, devices)

    def _expert_sizes(self, ranks: int) -> list[int]:
        """Experts are dealt over context and data ranks; tensor ranks cut every expert."""
        experts = self.work.shape.experts
        if experts is None:
            return [1]
        found = [n for n in divisors(experts.count) if ranks % n == 0]
        self.rejected["divisibility"] += len(divisors(experts.count)) - len(found)
        return found

    def _micro_batches(
        self, sizes: dict[str, Any], data: int, expert: int, recompute: bool, devices: int
    ) -> Iterator[Side]:
        longest = self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens
        share = self.workload.step_tokens / data  # a micro-batch larger than all that a replica gets is useless
        for factor in (1 << n for n in range(12)):
            if factor > 1 and longest * factor / 2 >= share:
                return
            config = changed(
                self.config,
                "trainer",
                **sizes,
                data_parallel=data,
                expert_parallel=expert,
                recompute=recompute,
                distributed_optimizer=data * sizes["context_parallel"] > 1,
                micro_batch_tokens=longest * factor,
            )
            kinds = memory.trainer_bytes(config, self.work)
            if sum(kinds.values()) > self.usable:
                self.rejected["memory"] += 1
                return  # a larger one needs more
            yield Side(config, devices, kinds)

    # ---- rollout -----------------------------------------------------------------------------------------------------

    def rollouts(self, trainer_devices: int) -> Iterator[Side]:
        """Replicas on the devices that the trainer leaves, for every tensor size."""
        begin = 0 if self.shared else trainer_devices
        end = self.devices - self.reference_devices
        for tensor in self.tensor_sizes:
            if tensor > self.per_node and self.config.cluster.preset != "cpu":  # a replica is started on one node
                self.rejected["devices"] += 1
                continue
            try:
                check_rollout(self.work.shape, RolloutParallel(tensor=tensor))
            except ConfigError:
                self.rejected["divisibility"] += 1
                continue
            room = self._replicas(begin, end, tensor)
            if self.config.workflow.lend:
                room += trainer_devices // tensor
            useful = self.workload.groups_per_step * (self.config.workflow.max_lag + 1)
            if room < 1 or (self.config.workflow.update == "rolling" and room < 2):
                self.rejected["devices"] += 1
                continue
            for replicas in sorted({min(room, useful), min(room, self.workload.groups_per_step)}):
                if (side := self._replica(tensor, replicas)) is not None:
                    yield side

    def _replicas(self, begin: int, end: int, tensor: int) -> int:
        """Replicas of `tensor` devices in [begin, end) that do not lie across nodes, if they fit into one."""
        if tensor >= self.per_node:
            return (end - begin) // tensor
        count, at = 0, begin
        while at < end:
            node_end = min(end, (at // self.per_node + 1) * self.per_node)
            count += (node_end - at) // tensor
            at = node_end
        return count

    def _replica(self, tensor: int, replicas: int) -> Side | None:
        """With as many running answers as are wanted, or as the cache holds."""
        w, r = self.workload, self.config.rollout
        wanted = min(MAX_RUNNING, math.ceil(w.groups_per_step / min(replicas, w.groups_per_step)) * w.group_size)
        config = changed(
            self.config, "rollout", tensor_parallel=tensor, replicas=replicas, max_running=wanted, kv_cache_mb=1
        )
        per_token = memory.cache_bytes_per_token(config, self.work)
        longest = self.config.data.max_prompt_tokens + r.max_new_tokens
        rest = memory.rollout_bytes(config, self.work)
        free = (self.usable - sum(rest.values())) * self.work.cache_cut(tensor)
        # An answer holds on average its prompt and half of itself, longer ones for longer; a fifth is left for crowds.
        held = 1.2 * (w.prompt.mean + 0.5 * w.answer.biased_mean)
        running = min(wanted, int(free / (held * per_token))) if free > 0 else 0
        if running < 1 or free < longest * per_token:
            self.rejected["memory"] += 1
            return None
        cache = min(free, max(longest, running * min(longest, 2 * held)) * per_token)
        megabytes = max(1, math.ceil(cache / memory.MIB)) if cache < free else int(free / memory.MIB)
        config = changed(config, "rollout", max_running=running, kv_cache_mb=max(1, megabytes))
        return Side(config, tensor * replicas, memory.rollout_bytes(config, self.work))
