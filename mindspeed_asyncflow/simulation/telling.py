"""What is told of a simulated step: only what the simulation works out, in its own time."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
from collections.abc import Mapping
from typing import Any, TextIO

from mindspeed_asyncflow.observe.progress import Progress

# Stand-ins that the loops need, and what belongs to the machine that simulates.
NOT_SIMULATED = (
    *("reward/*", "score/*", "actor/grad_norm", "actor/lr", "perf/host_memory_bytes"),
    *("weight_sync/probe_gap_max", "weight_sync/bytes", "weight_sync/saved_share", "weight_sync/unchanged_share"),
    *("dock/used_ratio", "dock/back_pressure_s", "dock/served_by_other_pairs"),
)


def simulated(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step without `NOT_SIMULATED`."""
    return {
        name: value
        for name, value in metrics.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in NOT_SIMULATED)
    }


class SimMetrics:
    """In place of a `MetricsWriter`; None: nobody wants the metrics of each step."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is not None:
            self._writer.write(step, simulated(metrics))


class SimProgress(Progress):
    """A `Progress` whose seconds are virtual, and called so."""

    def __init__(self, total_steps: int, stream: TextIO, **options: Any) -> None:
        super().__init__(total_steps, stream, clock=VirtualClock(), **options)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, simulated(metrics))

    def _elapsed(self) -> str:
        return f"{super()._elapsed()} simulated"


class VirtualClock:
    """Seconds of the loop that runs; after it those at which it was asked last."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self) -> float:
        with contextlib.suppress(RuntimeError):  # before and after the run
            self._last = asyncio.get_running_loop().time()
        return self._last
