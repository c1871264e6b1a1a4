"""Workers on a device that a trainer rank shares with a rollout replica, for `Turns`: what each verb does there.

    verb        replica in a process of its own            replica in the trainer's process (in place)
    give        train state to the host                    the same, and the generation weights are filled from it
    rouse       the engine wakes, without weights          -
    load        a version out of the relay                 what was filled is compared with what was published
    rest        the engine drops weights and caches        -
    take_back   train state comes back, bit for bit        generation weights and caches go; the same

In both ways the books of the device prove that one side has left before the other comes: `give` and `take_back` raise
`PlatformError` where a byte is left.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mindspeed_asyncflow.engines.base import RolloutEngine, SharingTrainEngine
from mindspeed_asyncflow.errors import PlatformError, WeightSyncError
from mindspeed_asyncflow.platforms.memory import (
    GENERATION_WEIGHTS,
    GRADIENTS,
    KV_CACHE,
    OPTIMIZER,
    TRAIN_WEIGHTS,
    DeviceMemory,
    HostPool,
)
from mindspeed_asyncflow.records import Completion, UpdateReport, WeightManifest
from mindspeed_asyncflow.reshard.in_place import InPlace, ReshardReport
from mindspeed_asyncflow.reshard.swap import HostSwap
from mindspeed_asyncflow.reshard.unstored import verify
from mindspeed_asyncflow.workflow.train_worker import TrainWorker
from mindspeed_asyncflow.workflow.workers import Question, RolloutReport, RolloutWorker, RowBatch

TRAIN_KINDS = (TRAIN_WEIGHTS, GRADIENTS, OPTIMIZER)
GENERATION_KINDS = (GENERATION_WEIGHTS, KV_CACHE)
MIB = 1 << 20


class SharedDevice(Protocol):
    """How train state leaves one device and comes back."""

    memory: DeviceMemory

    def give(self, version: int) -> None: ...

    def take_back(self) -> None: ...


class SwappedDevice:
    """Train state goes to the host; who generates here has a process of its own."""

    def __init__(self, engine: SharingTrainEngine, memory: DeviceMemory) -> None:
        self.engine, self.memory = engine, memory
        self._swap = HostSwap(memory, HostPool(memory.platform))

    def give(self, version: int) -> None:
        self._swap.out(self.engine.train_state())

    def take_back(self) -> None:
        """Raises `PlatformError` where the replica has left too little of the device: its sleep freed less than it
        said."""
        wanted, unclaimed = self._swap.bytes_out, self.memory.platform.unclaimed_bytes()
        if unclaimed is not None and unclaimed + self.memory.free_bytes < wanted:
            room = unclaimed + self.memory.free_bytes
            raise PlatformError(
                f"train state of {wanted / MIB:.0f} MiB finds {room / MIB:.0f} MiB free on its device, although the "
                "replica there sleeps: it keeps buffers of its groups, captured graphs, or a pool that frees nothing"
            )
        self._swap.back()


class FilledDevice:
    """Trainer and rollout engine of one process. Giving is collective: all ranks fill their replicas together."""

    def __init__(self, in_place: InPlace, memory: DeviceMemory) -> None:
        self.in_place, self.memory = in_place, memory
        self.filled: ReshardReport | None = None  # while generating

    def give(self, version: int) -> None:
        self.filled = self.in_place.to_generation(version)

    def take_back(self) -> None:
        self.filled = None
        self.in_place.to_training()


class GivingTrainWorker(TrainWorker):
    """A trainer rank whose device is used by a replica in turn."""

    def __init__(self, *, device: SharedDevice, **how: Any) -> None:
        super().__init__(**how)
        self.device = device

    def give(self) -> None:
        """Train state leaves the device, as soon as the newest version is written."""
        self.publisher.settle()
        version = self.publisher.version
        with self.tracer.span("device/give", lane=self.name, version=version):
            self.device.give(version)
        self._book("device/generates", TRAIN_KINDS)

    def take_back(self) -> None:
        """Train state is on the device again."""
        with self.tracer.span("device/take_back", lane=self.name):
            self.device.take_back()
        self._book("device/trains", GENERATION_KINDS)

    def _book(self, event: str, gone: tuple[str, ...]) -> None:
        usage = self.device.memory.usage()
        self.tracer.instant(event, lane=self.name, **usage)
        left = {kind: usage[kind] for kind in gone if usage[kind]}
        if left:
            raise PlatformError(f"{self.name}: {event}, and on the device are still bytes of {left}")


class FilledRolloutWorker(RolloutWorker):
    """A replica in the process of a trainer rank, which fills its weights. It answers with the fingerprint that was
    published, once it has shown that it holds those bytes."""

    def __init__(self, engine: RolloutEngine, **how: Any) -> None:
        super().__init__(engine, **how)
        self.device: FilledDevice | None = None  # when the trainer is there too
        self._published: Mapping[str, str] = {}  # the engine's own fingerprint -> the published one

    def rouse(self) -> None:
        """The trainer rank does it in `give`."""

    def rest(self) -> None:
        """The trainer rank does it in `take_back`; before it has one, the engine must sleep by itself."""
        if self.device is None:
            super().rest()

    def load(self, manifest: WeightManifest) -> UpdateReport:
        """Prove that the weights that were filled are those of `manifest`. Raises `WeightSyncError`."""
        began = time.perf_counter()
        filled = None if self.device is None else self.device.filled
        if self.device is None or filled is None or filled.version != manifest.version:
            holds = "nothing" if filled is None else f"version {filled.version}"
            raise WeightSyncError(f"{self.name} was filled with {holds} and should serve version {manifest.version}")
        with self.tracer.span("rollout/load_weights", lane=self.name, version=manifest.version):
            verify(manifest, self.device.in_place.served, self.name)
        self._published = {filled.fingerprint: manifest.fingerprint}
        return UpdateReport(manifest.version, filled.seconds + time.perf_counter() - began, manifest.fingerprint)

    def generate(self, claim_id: int, batch: RowBatch) -> RolloutReport:
        report = super().generate(claim_id, batch)
        served = tuple((version, self._published.get(own, own)) for version, own in report.served)
        return dataclasses.replace(report, served=served)

    def answer(
        self, questions: Sequence[Question], temperature: float | None = None, alone: bool = False
    ) -> list[Completion]:
        answers = super().answer(questions, temperature, alone)
        published = self._published
        return [dataclasses.replace(a, fingerprint=published.get(a.fingerprint, a.fingerprint)) for a in answers]
