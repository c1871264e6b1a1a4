"""A recorded run once more: the same rows in the same chunks through the trainer, compared version by version.

No engine answers and no scorer scores: what they gave is in the record. Of every chunk that a step trained, the rows go
into a dock, the `train` task claims them under the law of staleness that held then, and the trainer ranks get the plan
that they got. Compared, in this order: the sums of every chunk (losses among them), gradient norm and learning rate of
the optimizer step, and the bytes of the version that it made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import Claim, DockClient
from mindspeed_asyncflow.dock.gather import take
from mindspeed_asyncflow.errors import DeadlineExceeded, RecordError
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.relay import assemble
from mindspeed_asyncflow.reshard.relay_table import RelayTable
from mindspeed_asyncflow.workflow.events import exact_sums, manifest_fields, optim_fields
from mindspeed_asyncflow.workflow.record import Chunk, Record, Step
from mindspeed_asyncflow.workflow.sample_log import StepSamples, read_step

PARTITION = "replay"
Row = tuple[int, int]  # group, member
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Verdict:
    repeated: int  # versions that are the same bit for bit, version 0 not counted
    difference: str  # the first one, in words; empty: none


class Replay:
    """`trainers` are proxies whose methods can be awaited, `leaders` the indices of one rank of every data-parallel
    replica, `samples` the folder of the recorded samples, `relay` and `table` where the ranks write versions to."""

    def __init__(
        self,
        config: Config,
        record: Record,
        samples: Path,
        dock: DockClient,
        trainers: Sequence[Any],
        leaders: Sequence[int],
        relay: str,
        table: RelayTable,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.record, self.samples, self.dock = config, record, samples, dock
        self.trainers, self.leaders, self.relay, self.table, self.say = trainers, leaders, relay, table, say

    async def run(self, steps: int) -> Verdict:
        """Repeat the first `steps` steps, or up to the first difference."""
        await self._all_ranks("start", 0, [])
        difference = await self._compare_version(0)
        if difference:
            return Verdict(0, f"{difference}; the model is not the one that the run began with (model.source)")
        for step in self.record.steps[:steps]:
            difference = await self._repeat(step)
            if difference:
                return Verdict(step.version - 1, difference)
            self.say(f"version {step.version}: same")
        return Verdict(steps, "")

    async def _repeat(self, step: Step) -> str:
        """The first difference while `step.version` is made again; empty: none."""
        samples = await asyncio.to_thread(read_step, self.samples, step.version - 1, self.config.trainer.data_parallel)
        where = {row: i for i, row in enumerate(zip(samples.groups.tolist(), samples.members.tolist()))}
        for number, chunk in enumerate(step.chunks, 1):
            sums = await self._train(step.version - 1, chunk, samples, where)
            name = f"version {step.version}, chunk {number} of {len(step.chunks)}"
            for replica, (recorded, repeated) in enumerate(zip(chunk.sums, sums)):
                difference = first_difference(f"{name}, replica {replica}", recorded, repeated)
                if difference:
                    return difference
        finish = (await self._all_ranks("finish", step.version, step.tokens, step.samples))[0]
        difference = first_difference(f"version {step.version}", step.optim, optim_fields(finish.optim))
        return difference or await self._compare_version(step.version)

    async def _train(
        self, step: int, chunk: Chunk, samples: StepSamples, where: Mapping[Row, int]
    ) -> list[dict[str, float | str]]:
        """Gradients of one chunk; the sums of one rank of every replica."""
        rows = [(group, member) for replica in chunk.plan for batch in replica for group, member in batch]
        unknown = [row for row in rows if row not in where]
        if unknown:
            raise RecordError(f"step {step} trained (group, member) {unknown[0]}, which is not among its samples")
        claim = await asyncio.to_thread(self._feed, step, chunk, samples, np.array([where[r] for r in sorted(rows)]))
        handle = dict(zip(zip(claim.group_ids.tolist(), claim.members.tolist()), claim.rows.tolist()))
        plan = [[[handle[group, member] for group, member in batch] for batch in replica] for replica in chunk.plan]
        spans = dict(zip(claim.rows.tolist(), zip(claim.version_min.tolist(), claim.version_max.tolist())))
        identity = {row: who for who, row in handle.items()}
        reports = await self._all_ranks("train", plan, spans, identity, chunk.rules)
        await asyncio.to_thread(self._remove, claim)
        return [exact_sums(reports[i].sums) for i in self.leaders]

    def _feed(self, step: int, chunk: Chunk, samples: StepSamples, index: np.ndarray) -> Claim:
        """The rows `index`, whole groups one after another, into the dock and out again as a claim."""
        ids, first, counts = np.unique(samples.groups[index], return_index=True, return_counts=True)
        values = {
            name: take(column, index[first] if self.dock.schema.column(name).shared else index)
            for name, column in samples.columns.items()
        }
        self.dock.put(
            PARTITION,
            ids,
            counts,
            counts,
            samples.members[index],
            values,
            versions=(samples.versions[0][index], samples.versions[1][index]),
        )
        w = self.config.workflow
        claim = self.dock.claim(
            "train",
            len(ids),
            partition=PARTITION,
            worker="trainer",
            unit="groups",
            group_ids=ids.tolist(),
            at_least=len(ids),
            min_version=step - w.max_lag if w.stale == "drop" else None,
        )
        if claim.dropped or len(claim.rows) != len(index):
            group = claim.dropped[0][0] if claim.dropped else "some group"
            raise RecordError(
                f"step {step} trained group {group} with tokens older than workflow.max_lag {w.max_lag} allows"
            )
        return claim

    def _remove(self, claim: Claim) -> None:
        self.dock.done(claim.claim_id)
        self.dock.free(claim.rows)

    async def _compare_version(self, version: int) -> str:
        shards = await self._all_ranks("published", version)
        manifest = assemble(version, self.table, self.relay, [s.checksums for s in shards])
        return different_bytes(self.table, self.record.published[version], manifest)

    async def _all_ranks(self, method: str, *args: Any) -> list[Any]:
        calls = asyncio.gather(*(getattr(trainer, method)(*args) for trainer in self.trainers))
        return list(await within(calls, self.config.workflow.watchdog_s, f"the trainer ranks to {method}"))


async def within(work: Awaitable[T], limit_s: float, whom: str) -> T:
    try:
        return await asyncio.wait_for(work, limit_s)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(f"waited {limit_s:g} s (workflow.watchdog_s) for {whom}") from None


def first_difference(what: str, recorded: Mapping[str, Any], repeated: Mapping[str, Any]) -> str:
    """In words; empty: the numbers are the same, every bit."""
    for name in sorted(recorded.keys() | repeated.keys()):
        before, now = recorded.get(name, "nothing"), repeated.get(name, "nothing")
        if before != now:
            return f"{what}: {name} was {before!r} and is {now!r}"
    return ""


def different_bytes(table: RelayTable, recorded: Mapping[str, Any], manifest: WeightManifest) -> str:
    """The first shard of a version that has other bytes, in words; empty: none."""
    now = manifest_fields(manifest)
    if now == recorded:
        return ""
    what = f"version {manifest.version}"
    before = [recorded["checksums"][i : i + 8] for i in range(0, len(recorded["checksums"]), 8)]
    after = [now["checksums"][i : i + 8] for i in range(0, len(now["checksums"]), 8)]
    if len(before) != len(after):
        return (
            f"{what}: {len(before)} shards were published and {len(after)} are: other parallel sizes or another model"
        )
    differ = [i for i, (a, b) in enumerate(zip(before, after)) if a != b]
    if not differ:
        return f"{what}: its bytes are the same, but tensors have other names or shapes"
    return f"{what}: {table.describe(differ[0])} has other bytes; {len(differ)} of {len(after)} shards differ"
