"""When a published weight version is at hand where a replica runs.

On the trainers' node that is at its publication. The replicas of any other node share one mirror: it fetches the newest
version beside everything else, one at a time, and the version has arrived when all of it lies in the memory of the
node. Nobody waits for a fetch but a batch that may not be answered with anything older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError, WorkerLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.relay_mirror import PullReport
from mindspeed_asyncflow.workflow.clock import now


@dataclass(frozen=True, slots=True)
class Published:
    """A version that replicas may load, and the trainer's log-probabilities of the probe answers at it."""

    manifest: WeightManifest
    expected: asyncio.Future[list[np.ndarray]]

    @property
    def version(self) -> int:
        return self.manifest.version


@dataclass(frozen=True, slots=True)
class Mirror:
    """One node's mirror. `fetch` brings a version there: (manifest of the copy, what was moved)."""

    node: str
    replicas: tuple[int, ...]  # that load from it; the first one's process fetches
    fetch: Callable[[WeightManifest], Awaitable[tuple[WeightManifest, PullReport]]]


class Arrivals:
    """Lives in the driver's event loop. Replicas that no mirror names share a node with the trainers."""

    def __init__(self, replicas: int, mirrors: Sequence[Mirror], keep: int) -> None:
        self.mirrors, self.keep = list(mirrors), keep
        self.newest: Published | None = None
        self.news = [asyncio.Event() for _ in range(replicas)]  # set when something newer arrives
        self._at: list[Published | None] = [None] * replicas
        mirrored = {i for mirror in mirrors for i in mirror.replicas}
        self._local = [i for i in range(replicas) if i not in mirrored]
        self._fetches: dict[int, asyncio.Task[None]] = {}  # by the replica that fetches
        self._since: dict[int, tuple[str, int, float]] = {}  # node, version and begin of running fetches
        self._next = asyncio.Event()  # anything arrives, or fails
        self._failure: BaseException | None = None
        self.new_step()

    def new_step(self) -> None:
        """Longest fetch and moved bytes of a step are counted anew."""
        self.step_fetch_s = 0.0
        self._step_bytes = [0, 0]  # in full, over the wire

    @property
    def step_saved(self) -> float:
        """Share of the bytes of this step's fetches that needed not to be sent."""
        full, wire = self._step_bytes
        return max(0.0, 1 - wire / full) if full else 0.0

    def publish(self, published: Published) -> None:
        """Replicas on the trainers' node have it now; mirrors begin to fetch it."""
        self._check()
        self.newest = published
        self._arrive(self._local, published)
        for mirror in self.mirrors:
            running = self._fetches.get(mirror.replicas[0])
            if running is None or running.done():
                self._begin(mirror)

    def _begin(self, mirror: Mirror) -> None:
        task = asyncio.ensure_future(self._follow(mirror))
        self._fetches[mirror.replicas[0]] = task
        task.add_done_callback(self._ended)

    def replace_mirror(self, first: int, mirror: Mirror | None) -> None:
        """`mirror` takes over from the one whose fetching replica, `first`, is gone; it has no version yet."""
        self.mirrors = [m for m in self.mirrors if m.replicas[0] != first]
        running = self._fetches.pop(first, None)
        if running is not None:
            running.cancel()
        if mirror is None:
            return
        self.mirrors.append(mirror)
        self._local = [i for i in self._local if i not in mirror.replicas]  # one that joined on another node
        for index in mirror.replicas:
            self._at[index] = None
        if self.newest is not None:
            self._begin(mirror)

    def at(self, index: int) -> Published | None:
        """The newest version that replica `index` can load."""
        return self._at[index]

    def held(self, indices: Iterable[int]) -> list[int]:
        """Versions that these replicas may come to load although newer ones are published."""
        arrived = [published.version for i in indices if (published := self._at[i]) is not None]
        return arrived + [version for _, version, _ in self._since.values()]

    async def wait(self, index: int, version: int) -> None:
        """Wait until replica `index` can load `version` or a newer one. Raises what a fetch failed with."""
        self._check()
        while version >= 0 and self._version_at(index) < version:
            await self._next.wait()
            self._check()

    async def _follow(self, mirror: Mirror) -> None:
        """Fetch to one node until the newest version is there. What is superseded meanwhile is left out."""
        first = mirror.replicas[0]
        assert self.newest is not None, "a fetch follows publish"
        while self._version_at(first) < self.newest.version:
            wanted = self.newest
            self._since[first] = mirror.node, wanted.version, now()
            try:
                manifest, report = await mirror.fetch(wanted.manifest)
            except (WeightSyncError, DeadlineExceeded) as error:
                said = f"rollout{first} could not fetch weight version {wanted.version} to node {mirror.node}"
                newer = self.newest.version - wanted.version
                if isinstance(error, DeadlineExceeded) or newer < self.keep - 1:
                    raise WeightSyncError(f"{said}: {error}") from error
                get_logger("weights").info("%s before it was dropped, and goes on with the newest", said)
                continue
            finally:
                del self._since[first]
            self.step_fetch_s = max(self.step_fetch_s, report.seconds)
            self._step_bytes[0] += report.full_bytes
            self._step_bytes[1] += report.wire_bytes
            self._arrive(mirror.replicas, Published(manifest, wanted.expected))

    def _arrive(self, replicas: Sequence[int], published: Published) -> None:
        for index in replicas:
            self._at[index] = published
            self.news[index].set()
        self._tell()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or isinstance(task.exception(), WorkerLost):
            return  # whoever learns that a process died replaces its mirror
        if task.exception() is not None:
            self._failure = task.exception()
            self._tell()

    def _tell(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _version_at(self, index: int) -> int:
        published = self._at[index]
        return -1 if published is None else published.version

    def describe(self) -> list[str]:
        """Running fetches, for messages."""
        moment = now()
        return [f"node {node} fetches {v} for {moment - began:.1f} s" for node, v, began in self._since.values()]
