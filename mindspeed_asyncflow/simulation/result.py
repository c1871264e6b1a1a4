"""What a simulated run says, and how it is measured. Every number is simulated: no device was involved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

LABEL = "simulated, not run on NPUs"


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Times in virtual seconds. Rates, shares and the mean step leave out the first `simulation.skip_steps` steps, and
    shares also the last `workflow.max_lag` ones."""

    label: str
    devices: int
    steps: int  # trained
    skipped: int  # of these, steps that rates leave out
    tokens_per_s: float  # (mean prompt + mean answer tokens) x samples / time, as arXiv 2507.01663 counts
    tokens_per_s_per_device: float
    samples_per_s: float
    step_s: float  # mean
    step_times_s: list[float]  # all steps
    idle: dict[str, float]  # share of time without work: trainer, rollout, reward, reference (where there is one)
    lag_histogram: dict[int, int]  # rows by lag of their oldest trained token
    oldest_by_step: list[int]  # oldest version that sampled a trained token, per step
    load_s: float  # what one update of a replica takes from answering
    rollout_exposed_share: float  # share of replica time in which weights were loaded
    publish_wait_s: float  # mean time that an optimizer step waited for the version before to be written
    train_block_s: float  # mean time from the first work of a step to its last
    train_gap_s: float  # mean time between two such blocks
    issued: int
    trained: int
    open: int
    dropped: dict[str, int]
    violations: dict[str, int]  # of the law and of what must hold for every trained row; none in a sound run
    turns: int  # times that shared devices changed hands
    real_s: float  # that the simulation took
    note: str = ""

    @property
    def max_lag(self) -> int:
        return max(self.lag_histogram, default=0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self) | {"max_lag": self.max_lag}
        values["lag_histogram"] = {str(lag): rows for lag, rows in sorted(self.lag_histogram.items())}
        return values


@dataclass(slots=True)
class Mark:
    """Sums at the end of a step."""

    at_s: float
    tokens: int  # prompts and answers trained so far
    rows: int
    busy: Mapping[str, float]  # seconds by worker
    exposed_s: Mapping[str, float]  # of each replica, spent in loads
    waited_s: float  # optimizer steps, for the version before


@dataclass(slots=True)
class Marks:
    """The run so far; `begun` is step 0's beginning."""

    begun: Mark
    steps: list[Mark] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)

    def window(self, skip: int) -> tuple[Mark, Mark, int]:
        """First and last mark of what is measured, and how many steps it leaves out: never all."""
        skip = min(skip, max(0, len(self.steps) - 1))
        return (self.steps[skip - 1] if skip else self.begun), self.steps[-1], skip

    def before_the_end(self, skip: int, max_lag: int) -> Mark:
        """Last mark for shares of time: in the last `max_lag` steps nothing more is issued and replicas run dry."""
        return self.steps[max(min(skip, len(self.steps) - 1), len(self.steps) - 1 - max_lag)]

    def step_times(self) -> list[float]:
        ends = [self.begun.at_s, *(mark.at_s for mark in self.steps)]
        return np.diff(ends).tolist()


def idle_of(first: Mark, last: Mark) -> dict[str, float]:
    """Share of time without work by kind of worker, over those that were there at both ends."""
    wall = last.at_s - first.at_s
    shares: dict[str, list[float]] = {}
    for name, busy in last.busy.items():
        if name in first.busy and wall > 0:
            kind = name.rstrip("0123456789")
            shares.setdefault(kind, []).append(max(0.0, 1 - (busy - first.busy[name]) / wall))
    return {kind: float(np.mean(values)) for kind, values in shares.items()}


def blocks(spans: list[tuple[float, float]], ends: list[float]) -> tuple[float, float]:
    """Mean length of the trainer's work on a step from its first to its last span, and mean time between two of them.

    `ends`: when each step was done.
    """
    if not spans or not ends:
        return 0.0, 0.0
    begins, stops = np.array(spans).T
    first = np.searchsorted(begins, [-1.0, *ends[:-1]], side="left")
    last = np.searchsorted(stops, np.array(ends) + 1e-9, side="right") - 1
    lengths = stops[last] - begins[np.minimum(first, len(begins) - 1)]
    gaps = begins[first[1:]] - stops[last[:-1]]
    return float(lengths.mean()), float(gaps.mean()) if len(gaps) else 0.0
