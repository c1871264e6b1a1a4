"""Which side holds a run back, in one sentence, and which setting to turn: a pure function of its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_asyncflow.config.feasibility import devices
from mindspeed_asyncflow.config.schema import Config

WAITS = 0.10  # a side that is idle less than this share of the time is busy
APART = 0.10  # idle shares that differ by less are alike
MOST_LAG = 4  # no more lag than this is advised: answers get too old to learn from
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

    @classmethod
    def of(cls, config: Config) -> Sizes:
        w = config.workflow
        return cls(
            max_lag=w.max_lag,
            keep_versions=w.keep_versions,
            overlap=w.overlap,
            shared=w.schedule == "colocated",
            replicas=config.rollout.replicas,
            data_parallel=config.trainer.data_parallel,
            scorers=config.reward.workers,
            nodes=math.ceil(devices(config) / config.cluster.device.devices_per_node),
            samples_per_step=config.samples_per_step,
            by_client=tuple(config.service.by_client),
        )


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
        head, more = f"trainer and rollout wait for each other, {_share(trainer)} and {_share(rollout)}", []
    elif trainer > rollout:
        head, more = f"rollout-bound: trainer waits {_share(trainer)}", [_more_rollout(sizes)]
    else:
        head, more = f"trainer-bound: rollout waits {_share(rollout)}", [_more_training(sizes)]
    advice = [*_looser(trainer, rollout, sizes), *more]
    return f"{head}; try {' or '.join(advice)}" if advice else head


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
    if sizes.nodes > 1:
        return "move one node to rollout"
    taken = f" and trainer.data_parallel {sizes.data_parallel - 1}" if sizes.data_parallel > 1 else ""
    return f"rollout.replicas {sizes.replicas + 1}{taken}"


def _more_training(sizes: Sizes) -> str:
    if sizes.nodes > 1:
        return "move one node to the trainer"
    taken = f" and rollout.replicas {sizes.replicas - 1}" if sizes.replicas > 1 else ""
    return f"trainer.data_parallel {sizes.data_parallel + 1}{taken}"


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
