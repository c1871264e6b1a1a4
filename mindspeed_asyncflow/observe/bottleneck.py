"""Which side holds a run back, in one sentence, and which setting to turn: a pure function of its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_asyncflow.config.feasibility import devices, on_npu, own_replicas
from mindspeed_asyncflow.config.machine import Machine, probe
from mindspeed_asyncflow.config.schema import Config

WAITS = 0.10  # a side that is idle less than this share of the time is busy
APART = 0.10  # idle shares that differ by less are alike
MOST_LAG = 4  # no more lag than this is advised: answers get too old to learn from
LEAST_STEPS = 10  # of a whole run: with fewer its beginning counts too much
INPUTS = ("idle/trainer", "idle/rollout", "queue/reward")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of the settings the advice depends on."""

    max_lag: int = 1
    keep_versions: int = 3
    overlap: bool = True
    shared: bool = False  # trainer and rollout take turns on the same devices
    replicas: int = 1
    data_parallel: int = 1
    scorers: int = 1
    nodes: int = 1
    samples_per_step: int = 256
    by_client: tuple[str, ...] = ()  # settings by which the run waits for a client (`service.prompts`, ...)
    cpus_left: int | None = None  # that no process of the run wants; None: the run is on NPUs
    rank_cpus: int = 1  # that one more of `trainer.data_parallel` wants
    replica_cpus: int = 1

    @classmethod
    def of(cls, config: Config, machine: Machine | None = None) -> Sizes:
        """`machine`: that of the run; default: this one. CPUs are counted as `asyncflow check` counts them."""
        w, t, r = config.workflow, config.trainer, config.rollout
        here = machine or probe()
        training = t.world_size * t.threads + config.critic_size * config.critic.threads
        replica = r.tensor_parallel * r.threads
        left = None if on_npu(config, here) else here.cpus - training - own_replicas(config) * replica
        return cls(
            max_lag=w.max_lag,
            keep_versions=w.keep_versions,
            overlap=w.overlap,
            shared=w.schedule == "colocated",
            replicas=r.replicas,
            data_parallel=t.data_parallel,
            scorers=config.reward.workers,
            nodes=math.ceil(devices(config) / config.cluster.device.devices_per_node),
            samples_per_step=config.samples_per_step,
            by_client=tuple(config.service.by_client),
            cpus_left=left,
            rank_cpus=training // t.data_parallel,
            replica_cpus=replica,
        )

    def have_cpus(self, more: int) -> bool:
        """Whether the run may want so many more: processes that take turns on a CPU make it slower."""
        return self.cpus_left is None or more <= self.cpus_left


def averaged(steps: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Means of `INPUTS` over the steps that have them."""
    found: dict[str, list[float]] = {name: [] for name in INPUTS}
    for metrics in steps:
        for name in INPUTS:
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                found[name].append(value)
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def whole_run(idle: Mapping[str, float], unscored: Sequence[float]) -> dict[str, float]:
    """`INPUTS` from idle shares by side (`trainer`, `rollout0`, ...) and what waited for a score at ends of steps."""
    rollout = [share for side, share in idle.items() if side.startswith("rollout")]
    return {
        "idle/trainer": idle["trainer"],
        "idle/rollout": sum(rollout) / max(1, len(rollout)),
        "queue/reward": sum(unscored) / max(1, len(unscored)),
    }


def bottleneck(metrics: Mapping[str, float], sizes: Sizes) -> str:
    """`metrics`: `INPUTS`, of a step or averaged. Empty where idle shares were not measured."""
    trainer, rollout = metrics.get("idle/trainer"), metrics.get("idle/rollout")
    if trainer is None or rollout is None:
        return ""
    if sizes.shared:
        return _turns(trainer, rollout, sizes)
    unscored = metrics.get("queue/reward", 0.0)
    if sizes.by_client and trainer >= WAITS and (found := _client(trainer, rollout, unscored, sizes)):
        return found
    if trainer >= WAITS and unscored >= sizes.samples_per_step / 2:
        return (
            f"scorer-bound: trainer waits {_share(trainer)}, {unscored:,.0f} answers wait for a score; "
            f"try reward.workers {2 * sizes.scorers}"
        )
    if trainer < WAITS and rollout < WAITS:
        return f"balanced: trainer waits {_share(trainer)}, rollout waits {_share(rollout)}"
    if abs(trainer - rollout) < APART:
        head, more, of = f"trainer and rollout wait for each other, {_share(trainer)} and {_share(rollout)}", "", ""
    elif trainer > rollout:
        head, more, of = f"rollout-bound: trainer waits {_share(trainer)}", _more_rollout(sizes), "replicas"
    else:
        head, more, of = f"trainer-bound: rollout waits {_share(rollout)}", _more_training(sizes), "trainer ranks"
    advice = [*_looser(trainer, rollout, sizes), *filter(None, [more])]
    if advice:
        return f"{head}; try {' or '.join(advice)}"
    return f"{head}; the machine has no CPUs for more {of}" if of else head


def _client(trainer: float, rollout: float, unscored: float, sizes: Sizes) -> str:
    """Where the run waits for whoever drives it; empty where it does not. The trainer waits."""
    if "service.rewards" in sizes.by_client and unscored >= sizes.samples_per_step / 2:
        waits = f"{unscored:,.0f} answers wait for its rewards; try to score several groups at the same time"
        return f"waiting for the client: trainer waits {_share(trainer)}, {waits}"
    if rollout < WAITS:
        return ""
    both = f"trainer waits {_share(trainer)}, rollout waits {_share(rollout)}"
    return f"waiting for the client: {both} ({', '.join(sizes.by_client)})"


def kind(sentence: str) -> str:
    """Its first words: `rollout-bound`."""
    return sentence.partition(":")[0].partition(",")[0].partition(";")[0]


def _looser(trainer: float, rollout: float, sizes: Sizes) -> list[str]:
    """Where both sides wait, it is for each other, and the window between them may be too narrow."""
    if not sizes.overlap:
        return ["workflow.overlap true"]
    if min(trainer, rollout) < WAITS or sizes.max_lag >= MOST_LAG:
        return []
    lag = sizes.max_lag + 1
    versions = f" with workflow.keep_versions {lag + 1}" if sizes.keep_versions <= lag else ""
    return [f"workflow.max_lag {lag}{versions}"]


def _more_rollout(sizes: Sizes) -> str:
    """Empty where the machine has no CPUs for it."""
    if sizes.nodes > 1:
        return "move one node to rollout"
    taken = f" and trainer.data_parallel {sizes.data_parallel - 1}" if sizes.data_parallel > 1 else ""
    more = sizes.replica_cpus - (sizes.rank_cpus if taken else 0)
    return f"rollout.replicas {sizes.replicas + 1}{taken}" if sizes.have_cpus(more) else ""


def _more_training(sizes: Sizes) -> str:
    """Empty where the machine has no CPUs for it."""
    if sizes.nodes > 1:
        return "move one node to the trainer"
    taken = f" and rollout.replicas {sizes.replicas - 1}" if sizes.replicas > 1 else ""
    more = sizes.rank_cpus - (sizes.replica_cpus if taken else 0)
    return f"trainer.data_parallel {sizes.data_parallel + 1}{taken}" if sizes.have_cpus(more) else ""


def _turns(trainer: float, rollout: float, sizes: Sizes) -> str:
    """On shared devices the side that is not at work is idle by design."""
    works, answers = 1 - trainer, 1 - rollout
    between = max(0.0, 1 - works - answers)
    head = f"taking turns: rollout {_share(answers)}, trainer {_share(works)}, neither {_share(between)} of the time"
    if between >= 2 * WAITS:
        return f"{head}; try larger steps (workflow.groups_per_step), which change hands less often"
    return head


def _share(value: float) -> str:
    return f"{value * 100:.0f} %"
