"""Who serves which version: the three ways to bring a replica up, and proof that what is served is what was trained.

    update      a replica loads                          while it loads
    delayed     the newest version, at its boundary      the others do not notice
    rolling     the same, one replica at a time          the others go on answering with what they have
    in_flight   a version as soon as it has arrived      its running requests are frozen and go on with the new weights

A replica loads what has *arrived* where it runs (`arrivals.py`): on the trainers' node every version that is published,
on other nodes what their mirrors have fetched. It goes on with what it has meanwhile, unless the lag law forbids that.
A *boundary* lies between two generation batches of a replica. In the first two ways nothing changes inside a batch. In
`rolling` a replica that finds another one loading answers its batch with the older version, unless the lag law forbids
that for this batch: then it waits for its turn. (With max_lag 0 the law always forbids it.)

Proof, in three places:
- after each load the fingerprint of the loaded bytes, and the log-probabilities of a fixed set of probe answers, are
  compared with the trainer's at the same version;
- with every batch of answers a replica reports which (version, fingerprint) pairs it served. A pair that was never
  published, or a version older than the replica had when the batch began, stops the run: that version is never older
  than `batch - workflow.max_lag`, so this is the rule "served weights must move" for every way of updating;
- a new version with the bytes of the one before, although the optimizer took a step, stops the run in float32 (the
  bytes are the weights, so training does nothing). In bfloat16 a small step can round away in all weights while the
  float32 masters move: this is a warning, and an error after `UNMOVED_LIMIT` versions in a row.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from mindspeed_asyncflow.errors import WeightSyncError, WorkerLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.records import OptimReport, UpdateReport, WeightManifest
from mindspeed_asyncflow.reshard.relay import assemble, unchanged_share
from mindspeed_asyncflow.reshard.relay_table import table_from_text
from mindspeed_asyncflow.workflow.arrivals import Arrivals, Mirror, Published
from mindspeed_asyncflow.workflow.clock import in_time, now
from mindspeed_asyncflow.workflow.events import NoEvents
from mindspeed_asyncflow.workflow.holds import Hold, Holds
from mindspeed_asyncflow.workflow.publisher import RankShards

# A correct load differs by rounding only: about 1e-5 in float32, up to 0.3 in bfloat16 (30 layers). The fingerprint
# proves that the right bytes were loaded; this finds an engine that computes something else with them.
GAP_LIMIT = {"float32": 1e-3, "bfloat16": 0.5}  # nat
UNMOVED_LIMIT = {"float32": 1, "bfloat16": 10}  # versions in a row
T = TypeVar("T")
NOTHING = -1  # version of a replica that has loaded none yet


class ServesWeights(Protocol):
    def load(self, manifest: WeightManifest) -> Coroutine[Any, Any, UpdateReport]: ...

    def score(self, sequences: Any) -> Coroutine[Any, Any, tuple[int, list[np.ndarray]]]:
        """(prompt [P], answer [L]) pairs to (served version, log-probabilities [L] each)."""
        ...


class WeightSync:
    """Lives in the driver's event loop.

    `replicas` by index; None: one that may join later. `relay` is the path of the relay on the trainers' node, `table`
    what it holds (`RelayTable.text`), `keep` how many versions of it (`workflow.keep_versions`). `mirrors` name the
    replicas that load from one.
    """

    def __init__(
        self,
        replicas: Sequence[ServesWeights | None],
        dtype: str,
        relay: str,
        table: bytes,
        *,
        update: str = "delayed",
        keep: int = 3,
        mirrors: Sequence[Mirror] = (),
        busy: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
        events: NoEvents | None = None,
        patience_s: float | None = None,
        hangs: Callable[[int, WorkerLost], None] = lambda index, error: None,
        carry: Callable[[int, WeightManifest], Coroutine[Any, Any, UpdateReport]] | None = None,
    ) -> None:
        """`patience_s`: a replica that takes longer for one call hangs, which `hangs` is told (None: no deadline).
        `carry`: brings a version into a replica, where that does not load it by itself."""
        self.patience_s, self.hangs = patience_s, hangs
        self.carry = carry or (lambda index, manifest: self._replica(index).load(manifest))
        self.replicas, self.update, self.keep, self.busy = list(replicas), update, keep, busy
        self.events = events or NoEvents()
        self.relay, self.table = relay, table_from_text(table)
        self.limit, self.unmoved_limit = GAP_LIMIT[dtype], UNMOVED_LIMIT[dtype]
        self.served = [NOTHING] * len(replicas)  # version of each replica
        self.newest: WeightManifest | None = None
        self.arrivals, self.holds = Arrivals(len(replicas), mirrors, keep), Holds()
        self.probe: list[tuple[np.ndarray, np.ndarray]] = []
        self._fingerprints: dict[int, str] = {}  # of every version that may still be reported
        self.locks = [asyncio.Lock() for _ in replicas]  # one who loads; delayed and rolling: or answers a batch
        self._turn = asyncio.Lock()  # rolling: the one that loads
        self._turns = 0  # that load or wait for the turn
        self._since: dict[object, tuple[int, int]] = {}  # running batches: replica, and its version at the beginning
        self._loading: dict[int, tuple[int, float]] = {}  # version and begin of running loads
        self.unmoved = 0
        self.unchanged_share = self.publish_s = 0.0  # of the newest version: share of its bytes, slowest rank's time
        self.gap_max = 0.0  # nat, over the whole run
        self.new_step()

    def new_step(self) -> None:
        """What is largest in a step is counted anew: gap, load time, still time, versions behind while answering."""
        self.arrivals.new_step()
        self.step_gap = self.step_load_s = self.step_still_s = 0.0
        self.step_behind = 0

    # ---- trainer side ------------------------------------------------------------------------------------------------

    def publish(
        self, ranks: Sequence[RankShards], expected: asyncio.Future[list[np.ndarray]], optim: OptimReport | None = None
    ) -> None:
        """All trainer ranks wrote their shards of a version: replicas may load it as soon as it has arrived.

        `expected`: the trainer's log-probabilities of the probe answers, when it has them. `optim`: the step that made
        the version.
        """
        manifest = assemble(ranks[0].version, self.table, self.relay, [r.checksums for r in ranks])
        self.publish_s = max(r.seconds for r in ranks)
        if self.newest is not None and optim is not None:
            self.unchanged_share = unchanged_share(self.newest, manifest)
            self._check_moved(self.newest, manifest, optim)
        self.newest = manifest
        self._fingerprints[manifest.version] = manifest.fingerprint
        self.events.note("published", manifest=manifest)
        there = [i for i, replica in enumerate(self.replicas) if replica is not None]
        in_use = [self.served[i] for i in there if self.served[i] != NOTHING] + self.arrivals.held(there)
        in_use += [since for _, since in self._since.values()]
        for version in [v for v in self._fingerprints if v < min(in_use, default=0)]:
            del self._fingerprints[version]
        self.step_behind = max([self.step_behind, *(self.behind()[i] for i, _ in self._since.values())])
        self.arrivals.publish(Published(manifest, expected))

    def _check_moved(self, before: WeightManifest, now: WeightManifest, optim: OptimReport) -> None:
        stepped = optim.applied and optim.grad_norm > 0 and optim.lr > 0
        if not stepped or now.fingerprint != before.fingerprint:
            self.unmoved = 0
            return
        self.unmoved += 1
        said = (
            f"version {now.version} has the same bytes as version {before.version}, although the optimizer took a step "
            f"(gradient norm {optim.grad_norm:.3g}, rate {optim.lr:.3g})"
        )
        if self.unmoved >= self.unmoved_limit:
            raise WeightSyncError(
                f"weights do not move: {said}, {self.unmoved} in a row; the step is too small for model.dtype (raise "
                "trainer.lr), or what is published is not what is trained"
            )
        get_logger("weights").warning("%s: a step this small rounds away; trainer.lr may be too low", said)

    # ---- who is there ------------------------------------------------------------------------------------------------

    def join(self, index: int, worker: ServesWeights) -> None:
        """A replica is up; it has no published weights yet."""
        self.replicas[index], self.served[index] = worker, NOTHING

    def retire(self, index: int) -> None:
        """A replica is gone: nothing waits for it any more."""
        self.replicas[index], self.served[index] = None, NOTHING
        self.locks[index] = asyncio.Lock()
        self.holds.end(index)

    def emptied(self, index: int) -> None:
        """A replica has no weights any more (it slept): its next boundary loads the newest again."""
        self.served[index] = NOTHING

    def replace_mirror(self, first: int, mirror: Mirror | None) -> None:
        """The process of replica `first`, which fetched for its node, is gone; `mirror` goes on for the others there.

        None: nobody can, and the replicas that depend on it must be retired.
        """
        self.arrivals.replace_mirror(first, mirror)

    # ---- rollout side ------------------------------------------------------------------------------------------------

    def is_behind(self, index: int) -> bool:
        """Whether replica `index` should load: something newer is there, and nobody holds it where it is."""
        arrived = self.arrivals.at(index)
        return index not in self.holds and arrived is not None and arrived.version > self.served[index]

    @contextlib.asynccontextmanager
    async def held(self, index: int, wanted: Published) -> AsyncIterator[Hold | None]:
        """Replica `index`, from its next boundary on, serves `wanted` and nothing else until the block ends.

        None: it serves something newer already, or the relay may drop `wanted` before it is loaded.
        """
        async with self.locks[index]:
            assert self.newest is not None, "a hold follows publish"
            stays = self.newest.version - wanted.version <= max(0, self.keep - 2)
            if self.served[index] < wanted.version and stays:
                await self._load_newest(index, wanted)
            hold = self.holds.begin(index, wanted.version) if self.served[index] == wanted.version else None
        try:
            yield hold
        finally:
            if hold is not None and not hold.over.is_set():
                self.holds.end(index)
                self.arrivals.news[index].set()

    @contextlib.asynccontextmanager
    async def boundary(self, index: int, needed: int) -> AsyncIterator[int]:
        """Replica `index` is between two batches and will answer, inside, one that needs at least version `needed`.

        Loads new weights as `update` says, and yields the version that the batch begins with. Outside `in_flight` no
        other caller can change the replica's weights before the block ends.
        """
        async with self.locks[index] if self.update != "in_flight" else contextlib.nullcontext():
            needed = max(needed, 0)  # the first batches may be answered with any version, but one there must be
            await self.arrivals.wait(index, needed)
            while self.update == "in_flight" and self.served[index] < needed:
                await self.holds.over(index, needed)
                await self.bring_up(index)
            await self.holds.over(index, needed)
            if self.update != "in_flight" and self.is_behind(index) and not self._may_skip(index, needed):
                await self._load_newest(index)
            batch = object()
            self._since[batch] = index, self.served[index]
            self.step_behind = max(self.step_behind, self.behind()[index])
            try:
                yield self.served[index]
            finally:
                del self._since[batch]

    def _may_skip(self, index: int, needed: int) -> bool:
        """Rolling: another replica loads, and this batch may be answered with the older version."""
        return self.update == "rolling" and self._turns > 0 and self.served[index] >= needed

    async def follow(self, index: int) -> None:
        """In flight: load every version as soon as it has arrived, or the newest of several. Never ends."""
        news = self.arrivals.news[index]
        while True:
            await news.wait()
            news.clear()
            await self.bring_up(index)

    async def bring_up(self, index: int) -> None:
        """Replica `index` loads what has arrived at its next boundary (in flight: now), if that is newer."""
        async with self.locks[index]:
            await self._load_newest(index)

    async def bring_all_up(self, indices: Iterable[int] | None = None) -> None:
        """Every replica (of `indices`) serves the newest version: start, evaluation, end of run."""
        chosen = range(len(self.replicas)) if indices is None else indices
        newest = NOTHING if self.newest is None else self.newest.version

        async def bring(index: int) -> None:
            await self.arrivals.wait(index, newest)
            if self.is_behind(index):
                await self.bring_up(index)

        await asyncio.gather(*(bring(i) for i in chosen if self.replicas[i] is not None))

    async def _load_newest(self, index: int, wanted: Published | None = None) -> None:
        """`wanted`: that one in place of the newest that has arrived; not loaded where the relay drops it meanwhile."""
        self._turns += 1
        try:
            async with self._turn if self.update == "rolling" else contextlib.nullcontext():
                with self.busy(f"rollout{index}"):
                    while self.is_behind(index) and not await self._load(index, wanted) and wanted is None:
                        pass
        finally:
            self._turns -= 1

    async def _load(self, index: int, wanted: Published | None) -> bool:
        """False: the version was dropped from the relay meanwhile, and as the replica answers nobody it may try anew.

        While it answers that would lose answers, so it is an error. It cannot come as long as `keep` > max_lag: the
        trainer does not get past the batch that the replica answers.
        """
        arrived = wanted or self.arrivals.at(index)
        assert arrived is not None and self.newest is not None, "loading follows publish"
        manifest = arrived.manifest
        began = now()
        self._loading[index] = (manifest.version, began)
        try:
            report = await self.in_time(index, self.carry(index, manifest), "weights loaded")
        except WeightSyncError as error:
            newest = self.newest.version
            if newest - manifest.version < self.keep - 1:
                raise
            said = (
                f"rollout{index} was loading version {manifest.version} when it was dropped: version {newest} is "
                f"published and the relay keeps {self.keep} (workflow.keep_versions; more than workflow.max_lag)"
            )
            if any(index == answers for answers, _ in self._since.values()):
                raise WeightSyncError(f"{said}: {error}") from error
            get_logger("weights").warning("%s; it loads the newest instead", said)
            await self.arrivals.wait(index, manifest.version + 1)
            return False
        finally:
            del self._loading[index]
        if report.version != manifest.version or report.fingerprint != manifest.fingerprint:
            raise WeightSyncError(
                f"rollout{index} loaded version {report.version} ({report.fingerprint}) where the trainer published "
                f"{manifest.version} ({manifest.fingerprint})"
            )
        self.served[index] = report.version
        self.events.note("loaded", replica=index, version=report.version, fingerprint=report.fingerprint)
        self.step_load_s = max(self.step_load_s, report.load_s)
        await self._check_probe(index, arrived.expected)
        self.step_still_s = max(self.step_still_s, now() - began)
        return True

    async def in_time(self, index: int, work: Coroutine[Any, Any, T], what: str) -> T:
        """What a call of replica `index` gives; where it gives nothing, the replica hangs and is lost."""
        try:
            return await in_time(work, self.patience_s)
        except asyncio.TimeoutError:
            error = WorkerLost(f"rollout{index} hangs: no {what} for {self.patience_s:g} s (rollout.timeout_s)")
            self.hangs(index, error)
            raise error from None

    def _replica(self, index: int) -> ServesWeights:
        replica = self.replicas[index]
        if replica is None:
            raise WorkerLost(f"rollout{index} has gone")
        return replica

    async def _check_probe(self, index: int, expected: asyncio.Future[list[np.ndarray]]) -> None:
        """Score the probe answers with replica `index` and compare with the trainer at the same version."""
        if not self.probe:
            return
        version, scored = await self.in_time(index, self._replica(index).score(self.probe), "probe scored")
        try:
            wanted = await asyncio.shield(expected)
        except WorkerLost as error:  # a trainer, not this replica
            raise WeightSyncError(f"the trainer has not scored the probe answers: {error}") from error
        gap = max(float(np.abs(a - b).max()) for a, b in zip(scored, wanted) if len(a))
        self.step_gap = max(self.step_gap, gap)
        self.gap_max = max(self.gap_max, gap)
        if version != self.served[index] or not gap <= self.limit:
            raise WeightSyncError(
                f"rollout{index} loaded version {self.served[index]} and serves {version}; its log-probabilities of "
                f"the probe answers differ from the trainer's by up to {gap:.3g} (limit {self.limit:g}): the engine "
                "does not hold the trained weights"
            )

    # ---- watchdog ----------------------------------------------------------------------------------------------------

    def check_served(self, index: int, since: int, served: Iterable[tuple[int, str]]) -> None:
        """Replica `index` answered a batch that it began at version `since` with these (version, fingerprint)."""
        for version, fingerprint in served:
            published = self._fingerprints.get(version, "none")
            if fingerprint != published:
                raise WeightSyncError(
                    f"rollout{index} answered with version {version} and fingerprint {fingerprint or 'none'}, and "
                    f"published was {published}: the engine does not hold the trained weights"
                )
            if version < since:
                raise WeightSyncError(
                    f"rollout{index} answered with version {version} ({fingerprint}) after it had loaded {since} "
                    f"({self._fingerprints.get(since)}): its weights do not move"
                )

    def behind(self) -> list[int]:
        """Versions that each replica is behind the newest published one; 0 for one that is not there."""
        newest = self.newest.version if self.newest is not None else 0
        return [newest - max(v, 0) if r is not None else 0 for v, r in zip(self.served, self.replicas)]

    @property
    def oldest_served(self) -> int:
        """Oldest version that a replica serves; one that sleeps serves none."""
        return min((v for v in self.served if v != NOTHING), default=NOTHING)

    def describe(self) -> str:
        """One line for messages of the no-progress watchdog."""
        moment = now()
        newest = "none" if self.newest is None else str(self.newest.version)
        words = []
        for i, version in enumerate(self.served):
            if self.replicas[i] is None:
                continue
            word = f"rollout{i} serves {version if version != NOTHING else 'none'}"
            if i in self._loading:
                wanted, began = self._loading[i]
                word += f", loading {wanted} for {moment - began:.1f} s"
            words.append(word)
        words += self.arrivals.describe() + self.holds.describe()
        return f"weights: version {newest} is published; " + "; ".join(words)


def expected_of(trainers: Sequence[Any]) -> asyncio.Future[list[np.ndarray]]:
    """The trainer's log-probabilities of the probe answers at its present version, when it has them: trainer ranks
    score between two steps, while their weights are on the way to the relay."""

    async def score() -> list[np.ndarray]:
        return (await asyncio.gather(*(t.score_probe() for t in trainers)))[0]

    scoring = asyncio.ensure_future(score())
    scoring.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised where it is awaited
    return scoring
