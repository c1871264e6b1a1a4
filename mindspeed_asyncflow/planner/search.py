"""The best use of the devices: bounds leave out what cannot win, the simulator decides among the rest. Pure.

A candidate joins one way of the trainer with one of rollout. Its bound (`estimate.step_bound_s`) is a step time that it
cannot beat, so one whose bound is above the best simulated step is left out without losing the optimum; a margin allows
for the lengths that a simulated run draws. Candidates are simulated in the order of their expected step until every
other one is left out, or `most` of them are done; what then was not simulated is counted by that name.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.candidates import Candidates, Side, with_references
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.estimate import (
    Estimate,
    Least,
    estimate,
    least_of_rollout,
    least_of_trainer,
    step_bound_s,
)
from mindspeed_asyncflow.planner.work import Work
from mindspeed_asyncflow.planner.workload import Workload

MARGIN = 0.05
NOISE = 0.003  # relative; steps that differ by less are equal
ESTIMATED = 400  # candidates with the lowest bounds that get an expectation


class Outcome(Protocol):
    """What a simulated run tells."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        ...

    @property
    def idle(self) -> dict[str, float]:
        """Share of the run in which a side did nothing: "trainer", "rollout"."""
        ...


Simulate = Callable[[Config, Costs], Outcome]
CostsOf = Callable[[Config], Costs]


@dataclass(frozen=True)
class Ranked:
    """One candidate with all that is known of it."""

    config: Config
    costs: Costs
    bound_s: float
    expected: Estimate
    memory: dict[str, dict[str, float]]  # side -> kind -> bytes of the fullest device
    outcome: Outcome | None = None

    @property
    def step_s(self) -> float:
        return self.outcome.step_s if self.outcome is not None else self.expected.step_s

    @property
    def devices(self) -> int:
        """Devices of trainer and rollout together; those of shared ones count once."""
        t, r, w = self.config.trainer, self.config.rollout, self.config.workflow
        rollout = r.replicas * r.tensor_parallel
        if w.schedule == "colocated":
            return max(t.world_size, rollout)
        lent = t.world_size // r.tensor_parallel * r.tensor_parallel if w.lend else 0
        s = self.config.simulation
        reference = s.references * s.reference_devices if self.config.algorithm.kl_coef > 0 else 0
        return t.world_size + max(0, rollout - lent) + reference

    @property
    def split(self) -> tuple[int, int, int]:
        """Trainer devices, replicas and their size: of candidates with the same ones the best is shown."""
        t, r = self.config.trainer, self.config.rollout
        return t.world_size, r.replicas, r.tensor_parallel


@dataclass
class Plan:
    best: Ranked
    others: list[Ranked]  # simulated, best of each split, slower than the best
    rejected: Counter[str]  # by reason
    simulated: int
    seconds: float


def search(
    config: Config,
    work: Work,
    costs_of: CostsOf,
    simulate: Simulate,
    *,
    devices: int,
    most: int | None = None,
    prune: bool = True,
    accept: Callable[[Config], bool] = lambda config: True,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The candidate for `devices` devices with the shortest simulated step; `most`: simulate at most so many. Without
    `prune` nothing is left out for its bound; only what `accept` says yes to takes part.

    Raises `ConfigError` with the counted reasons when nothing fits.
    """
    began = time.perf_counter()
    workload = Workload.of(config)
    ways = [Candidates(c, work, workload, devices) for c in with_references(config, work, devices)]
    pairs = [pair for way in ways for pair in _pairs(way, costs_of, workload, accept)]
    rejected = sum((way.rejected for way in ways), Counter())
    if not pairs:
        _nothing_fits(ways[0], rejected)
    say(f"{len(pairs)} candidates fit")
    pairs.sort(key=lambda pair: pair.bound_s)
    race = _Race(simulate, most, margin(config, workload) if prune else 1.0, say)
    _race(pairs, costs_of, workload, race)
    first, *others = _best_of_each(race.done)
    return Plan(first, others, rejected + race.left_out, len(race.done), time.perf_counter() - began)


def margin(config: Config, workload: Workload) -> float:
    """Bounds hold for expected lengths; a simulated run draws some, so its mean lies within two standard errors."""
    spread = math.sqrt(max(0.0, workload.answer.mean_square - workload.answer.mean**2)) / workload.answer.mean
    return min(0.5, MARGIN + 2 * spread / math.sqrt(workload.samples * config.simulation.steps))


@dataclass(frozen=True)
class _Pair:
    trainer: Side
    rollout: Side
    bound_s: float
    limit: str  # the side whose work is longer

    @property
    def config(self) -> Config:
        return self.trainer.config.model_copy(update={"rollout": self.rollout.config.rollout})


def _pairs(found: Candidates, costs_of: CostsOf, workload: Workload, accept: Callable[[Config], bool]) -> list[_Pair]:
    """All pairs that fit."""
    replicas: dict[int, list[tuple[Side, Least]]] = {}
    pairs: list[_Pair] = []
    for side in found.trainers():
        least = least_of_trainer(side.config, costs_of(side.config), workload)
        if side.devices not in replicas:
            sides = list(found.rollouts(side.devices))
            replicas[side.devices] = [(r, least_of_rollout(r.config, costs_of(r.config), workload)) for r in sides]
        for rollout, of_rollout in replicas[side.devices]:
            if found.shared and not _fits_in_turns(found, side, rollout):
                continue
            pair = _Pair(side, rollout, step_bound_s(found.config, least, of_rollout), _limit(least, of_rollout))
            if accept(pair.config):
                pairs.append(pair)
    return pairs


def _nothing_fits(found: Candidates, rejected: Counter[str]) -> NoReturn:
    reasons = ", ".join(f"{count} by {reason}" for reason, count in rejected.most_common())
    raise ConfigError(
        f"nothing fits {found.devices} devices of cluster.preset={found.config.cluster.preset} "
        f"({found.usable / 1e9:.1f} GB usable each): {reasons or 'no candidate'}; give more devices, or less to do "
        "(data.max_prompt_tokens, rollout.max_new_tokens)"
    )


def _limit(trainer: Least, rollout: Least) -> str:
    work = {
        "training": trainer.work_s + trainer.alone_s,
        "generation": rollout.work_s,
        "reference": trainer.reference_s,
    }
    return max(work, key=lambda name: work[name])


def _fits_in_turns(found: Candidates, trainer: Side, rollout: Side) -> bool:
    """In turn, the weights of both sides and a bucket are on a device at the moment of the swap."""
    both = trainer.memory["weights"] + rollout.memory["weights"] + trainer.memory["relay bucket"]
    if both > found.usable:
        found.rejected["memory"] += 1
        return False
    return True


def _rank(pair: _Pair, costs_of: CostsOf, workload: Workload) -> Ranked:
    costs = costs_of(pair.config)
    kinds = {"trainer": pair.trainer.memory, "rollout": pair.rollout.memory}
    return Ranked(pair.config, costs, pair.bound_s, estimate(pair.config, costs, workload), kinds)


@dataclass
class _Race:
    """Candidates against the best simulated one so far."""

    simulate: Simulate
    most: int | None
    margin: float
    say: Callable[[str], None]
    done: list[Ranked] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def best_s(self) -> float:
        return min((r.step_s for r in self.done), default=math.inf)

    def beaten(self, bound_s: float) -> bool:
        return self.margin < 1 and bound_s * (1 - self.margin) >= self.best_s

    @property
    def full(self) -> bool:
        return self.most is not None and len(self.done) >= self.most

    def run(self, candidate: Ranked) -> None:
        outcome = self.simulate(candidate.config, candidate.costs)
        self.done.append(replace(candidate, outcome=outcome))
        self.say(f"simulated {len(self.done)}: {outcome.step_s:.3g} s a step, best {self.best_s:.3g} s")


def _race(pairs: list[_Pair], costs_of: CostsOf, workload: Workload, race: _Race) -> None:
    """Simulate until every candidate is done, beaten by its bound, or the number of runs is used up."""
    likely = [(_rank(pair, costs_of, workload), pair) for pair in pairs[:ESTIMATED]]
    likely.sort(key=lambda item: (item[0].expected.step_s, item[1].bound_s))
    if race.most is not None:
        likely = _spread(likely, race.most)
    for candidate, pair in likely:
        if race.beaten(pair.bound_s):
            race.left_out[f"slower bound ({pair.limit})"] += 1
        elif race.full:
            race.left_out["not simulated"] += 1
        else:
            race.run(candidate)
    for pair in pairs[ESTIMATED:]:
        if race.beaten(pair.bound_s):
            race.left_out[f"slower bound ({pair.limit})"] += 1
        elif race.full:
            race.left_out["not simulated"] += 1
        else:
            race.run(_rank(pair, costs_of, workload))


def _spread(likely: list[tuple[Ranked, _Pair]], most: int) -> list[tuple[Ranked, _Pair]]:
    """Few runs shall see many splits: half of them, 4 at least, go to the best of each split."""
    heads: list[tuple[Ranked, _Pair]] = []
    rest: list[tuple[Ranked, _Pair]] = []
    seen: set[tuple[int, int, int]] = set()
    for item in likely:
        is_head = item[0].split not in seen and len(heads) < max(4, most // 2)
        (heads if is_head else rest).append(item)
        seen.add(item[0].split)
    return heads + rest


def _best_of_each(done: list[Ranked]) -> list[Ranked]:
    """The best, then the best of every other split, by rising step, then what else was simulated. Of candidates that
    are as fast as the best but for noise, the one with the least work is taken."""
    fastest = min(r.step_s for r in done)
    first = min((r for r in done if r.step_s <= fastest * (1 + NOISE)), key=lambda r: (r.devices, r.expected.train_s))
    seen = {first.split}
    others: list[Ranked] = []
    same: list[Ranked] = []
    for candidate in sorted(done, key=lambda r: r.step_s):
        if candidate is not first:
            (same if candidate.split in seen else others).append(candidate)
            seen.add(candidate.split)
    return [first, *others, *same]
