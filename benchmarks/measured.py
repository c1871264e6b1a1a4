"""What is kept of one run of either side, and the figures that follow from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

EDGE = 2  # steps left out at both ends: start-up effects first, and a pipeline that runs empty last


@dataclass(frozen=True, slots=True)
class Measured:
    label: str
    seed: int
    samples_per_step: int
    step_s: list[float]  # wall-clock seconds of each optimizer step, rollout included
    rewards: list[float]  # mean sampled reward of each step
    heldout_greedy: float | None
    wall_s: float  # of the whole process, start and end included
    foreign_cpu: float  # share of all cores that others used just before
    trainer_idle: float | None = None  # shares of the loop time; None for TRL, which has one process
    rollout_idle: float | None = None
    parts_s: dict[str, float] = field(default_factory=dict)  # mean seconds a step, by part
    settings: str = ""  # how the other side was run

    @property
    def samples_per_s(self) -> float:
        """Steady rate: without the first and the last EDGE steps."""
        return steady_rate(self.step_s, self.samples_per_step)

    @property
    def loop_samples_per_s(self) -> float:
        """All samples over all seconds of the loop, filling and emptying of the pipeline included."""
        return len(self.step_s) * self.samples_per_step / sum(self.step_s)

    def curve(self) -> tuple[list[float], list[float]]:
        """(seconds since the loop began, mean reward) at the end of each step."""
        return list(accumulate(self.step_s)), self.rewards

    def seconds_to(self, reward: float, window: int = 5) -> float | None:
        """Seconds until the mean over `window` steps first reaches `reward`."""
        seconds, rewards = self.curve()
        for end in range(window, len(rewards) + 1):
            if statistics.fmean(rewards[end - window : end]) >= reward:
                return seconds[end - 1]
        return None


def steady_rate(step_s: Sequence[float], samples_per_step: int) -> float:
    """Samples per second of the steps between the first and the last EDGE ones."""
    middle = step_s[EDGE:-EDGE]
    if not middle:
        raise ValueError(f"{len(step_s)} steps are too few: {2 * EDGE} of them are left out")
    return samples_per_step * len(middle) / sum(middle)


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float | None:
    """Median of the ratios of pairs that were measured one after the other."""
    ratios = [a / b for a, b in zip(above, below)]
    return round(statistics.median(ratios), 3) if ratios else None


def limiting_part(run: Measured) -> str:
    """In words: what the loop of `run`, one of ours, waits for."""
    assert run.trainer_idle is not None and run.rollout_idle is not None
    step_s = statistics.fmean(run.step_s)
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in run.parts_s.items())
    busy = (
        f"trainer busy {1 - run.trainer_idle:.0%}, rollout busy {1 - run.rollout_idle:.0%} of a step of {step_s:.3f} s"
    )
    if min(run.trainer_idle, run.rollout_idle) > 0.3:
        name = "the hand-over between rollout and trainer (both wait)"
    elif max(run.trainer_idle, run.rollout_idle) < 0.2:
        name = "the cores (both sides are busy all the time)"
    elif run.trainer_idle <= run.rollout_idle:
        name = "the update (the rollout side waits for it)"
    else:
        name = "generation (the trainer waits for it)"
    return f"{name}: {busy}; {parts}"
