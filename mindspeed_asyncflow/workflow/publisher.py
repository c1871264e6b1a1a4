"""One trainer rank's weights on their way into the relay, in a thread beside the next step's forward and backward.

    finish(k) ── optimizer step ── start(k+1) ──► forward/backward of step k+1 ... ── settle() ── optimizer step ──►
                                      └─ thread: cast, copy, checksum ──► result(k+1) for the driver

Weights change in the optimizer step only, so what the thread reads is version k+1 as long as `settle` comes first.
The thread calls no collective: each rank writes what it holds, as `reshard/relay_plan.py` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.platforms.base import Platform
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape
from mindspeed_asyncflow.reshard.relay_plan import Write
from mindspeed_asyncflow.reshard.relay_table import RelayTable


@dataclass(frozen=True, slots=True)
class RankShards:
    """What one rank wrote of a version."""

    version: int
    checksums: Mapping[int, int]  # crc32 by number of the shard in the relay's table
    seconds: float  # from the first byte to the last


class WritesVersions(Protocol):
    """A `RelayWriter`, or an `UnstoredWriter` where weights go into place directly."""

    path: str
    table: RelayTable

    def publish(self, version: int, tensors: Any) -> dict[int, int]: ...

    def close(self) -> None: ...


class Publisher:
    """`shards()` gives this rank's parameters by name; `writes` is its part of the plan."""

    def __init__(
        self,
        shards: Callable[[], Mapping[str, Any]],
        writes: Sequence[Write],
        relay: WritesVersions,
        *,
        platform: Platform,
        device: Any,  # torch.device
        name: str,
        timeout_s: float,
        tracer: Tracer,
    ) -> None:
        self.shards, self.writes, self.relay, self.name = shards, writes, relay, name
        self.platform, self.device, self.timeout_s, self.tracer = platform, device, timeout_s, tracer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-publish")
        self._running: Future[RankShards] | None = None
        self._version = -1

    @property
    def version(self) -> int:
        """The last one started: that of the weights now."""
        return self._version

    def start(self, version: int) -> None:
        """Begin to write `version`, the weights as they are now."""
        self.settle()
        self.platform.synchronize()  # the thread's stream does not wait for the optimizer's kernels by itself
        self._version = version
        self._running = self._thread.submit(self._write, version)

    def settle(self) -> float:
        """Wait until nothing is being written, so that weights may change; the seconds waited. Raises what failed."""
        began = time.perf_counter()
        if self._running is not None:
            self._await(self._running)
        return time.perf_counter() - began

    def result(self, version: int) -> RankShards:
        """Wait until `version`, the last one started, is written. Callable from another thread."""
        if self._running is None or version != self._version:
            raise WeightSyncError(f"{self.name} was asked for version {version} and is at version {self._version}")
        return self._await(self._running)

    def _await(self, running: Future[RankShards]) -> RankShards:
        try:
            return running.result(self.timeout_s)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"{self.name} did not write weight version {self._version} into the relay within {self.timeout_s:g} s "
                "(workflow.watchdog_s)"
            ) from None

    def _write(self, version: int) -> RankShards:
        began = time.perf_counter()
        span = self.tracer.span("train/publish", lane=f"{self.name} publishes", version=version)
        with span, self.platform.side_stream(self.device):
            checksums = self.relay.publish(version, self._boxes())
        return RankShards(version, checksums, time.perf_counter() - began)

    def _boxes(self) -> Iterator[tuple[str, Box, Any]]:
        """(full tensor's name, box, this rank's tensor of the box's shape), views only."""
        shards = self.shards()
        for write in self.writes:
            held, place = shards[write.param], write.segment.local
            matrix = held.detach().reshape(matrix_shape(held.shape))
            yield write.segment.name, write.segment.box, matrix[place.r0 : place.r1, place.c0 : place.c1]

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self.relay.close()
