"""The delayed update: who has which version, and proof that what is served is what was trained.

The trainer publishes a version to the relay and goes on at once. A replica loads the newest version at its next
boundary, between two generation batches. After each load a fixed set of probe answers is scored by the replica and
compared with the trainer's log-probabilities of the same version; a fingerprint or a gap that does not fit stops the
run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.records import UpdateReport, WeightManifest

# A correct load differs by rounding only: about 1e-5 in float32, up to 0.3 in bfloat16 (30 layers). The fingerprint
# proves that the right bytes were loaded; this finds an engine that computes something else with them.
GAP_LIMIT = {"float32": 1e-3, "bfloat16": 0.5}


class ServesWeights(Protocol):
    async def load(self, manifest: WeightManifest) -> UpdateReport: ...

    async def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[int, list[np.ndarray]]: ...


class WeightSync:
    def __init__(self, replicas: Sequence[ServesWeights], dtype: str) -> None:
        self.replicas = replicas
        self.limit = GAP_LIMIT[dtype]
        self.served = [0] * len(replicas)  # version of each replica
        self.newest: WeightManifest | None = None
        self.probe: list[tuple[np.ndarray, np.ndarray]] = []
        self._expected: dict[int, list[np.ndarray]] = {}  # trainer's log-probabilities by version
        self.gap_max = 0.0  # nat, over the whole run
        self.new_step()

    def new_step(self) -> None:
        """Largest gap and load time are counted anew."""
        self.step_gap = self.step_load_s = 0.0

    def publish(self, manifest: WeightManifest, expected: list[np.ndarray]) -> None:
        """The trainer wrote a version; replicas may load it from now on."""
        self.newest = manifest
        self._expected[manifest.version] = expected
        for version in [v for v in self._expected if v < min(self.served) and v != manifest.version]:
            del self._expected[version]

    def is_behind(self, index: int) -> bool:
        return self.newest is not None and self.newest.version > self.served[index]

    async def bring_up(self, index: int) -> float:
        """Load the newest version into replica `index` and check it; returns the seconds that it stood still."""
        began = time.perf_counter()
        manifest = self.newest
        assert manifest is not None, "bring_up follows publish"
        report = await self.replicas[index].load(manifest)
        if report.version != manifest.version or report.fingerprint != manifest.fingerprint:
            raise WeightSyncError(
                f"rollout{index} loaded version {report.version} ({report.fingerprint}) where the trainer published "
                f"{manifest.version} ({manifest.fingerprint})"
            )
        self.served[index] = report.version
        self.step_load_s = max(self.step_load_s, report.load_s)
        await self.check(index)
        return time.perf_counter() - began

    async def check(self, index: int) -> None:
        """Score the probe answers with replica `index` and compare with the trainer at the same version."""
        if not self.probe:
            return
        version, scored = await self.replicas[index].score(self.probe)
        gap = max(float(np.abs(a - b).max()) for a, b in zip(scored, self._expected[version]) if len(a))
        self.step_gap = max(self.step_gap, gap)
        self.gap_max = max(self.gap_max, gap)
        if not gap <= self.limit:
            raise WeightSyncError(
                f"rollout{index} serves version {version}, but its log-probabilities of the probe answers differ from "
                f"the trainer's by up to {gap:.3g} (limit {self.limit:g}): the engine does not hold the trained weights"
            )

    async def bring_all_up(self) -> None:
        """Every replica serves the newest version (start, evaluation, end of run)."""
        await asyncio.gather(*(self.bring_up(i) for i in range(len(self.replicas)) if self.is_behind(i)))
