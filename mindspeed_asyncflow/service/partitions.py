"""What tenants have who do not own the run: a partition of its dock for each, as a store that rows stream through.

    put_prompts_data, put_trajectories ─► rows ─► get_experience_data(task) ─► put_experience_data ─► ... ─► train: gone

Rows are in memory only: they go with the run. Everything here runs in the run's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mindspeed_asyncflow.dock.client import Claim
from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded, ServiceError, StaleHandle
from mindspeed_asyncflow.records import PromptRow
from mindspeed_asyncflow.service.experience import NOTHING, cast, columns_of
from mindspeed_asyncflow.service.outside import Outside
from mindspeed_asyncflow.service.prompts import encoded
from mindspeed_asyncflow.service.trajectories import given_of
from mindspeed_asyncflow.service.verbs import Column, Experience, Prompt, TrajectoryGroup
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.clock import now
from mindspeed_asyncflow.workflow.dock_port import SLICE_S, ThreadDock
from mindspeed_asyncflow.workflow.given import Given

T = TypeVar("T")
CLAIMERS = 4  # calls of one tenant that wait at the same time
ANY_VERSION = 1 << 30
ROW_BYTES = 64  # beside its columns


class TenantStore:
    """Rows, claims and groups of one tenant. Raises `ServiceError`."""

    def __init__(self, tenant: str, outside: Outside) -> None:
        assert outside.session is not None and outside.session.dock is not None
        self.session, self.config = outside.session, outside.config
        self.dock = ThreadDock(outside.session.dock.client, f"tenant.{tenant}", CLAIMERS)
        self.worker = f"tenant.{tenant}"
        self._claims: dict[int, tuple[str, Claim]] = {}
        self._rows: dict[int, tuple[int, int]] = {}  # handle -> number of its group, bytes
        self._coming_rows, self._coming_bytes = 0, 0  # on their way into the dock
        self._groups = 0

    # ---- rows come ---------------------------------------------------------------------------------------------------

    async def put_prompts(self, prompts: Sequence[Prompt]) -> Mapping[str, Any]:
        issues = await asyncio.to_thread(encoded, prompts, self.session.tokenizer, self.config.data)
        return await _to_its_end(self._stored(issues, [None] * len(issues)))

    async def put_trajectories(self, groups: Sequence[TrajectoryGroup]) -> Mapping[str, Any]:
        config, words = self.config, len(self.session.tokenizer)
        prompts = [group.prompt for group in groups]
        issues = await asyncio.to_thread(encoded, prompts, self.session.tokenizer, config.data)
        given = [given_of(g, issue.prompt_ids, config, words, ANY_VERSION) for g, issue in zip(groups, issues)]
        return await _to_its_end(self._stored(issues, given))

    async def _stored(self, issues: Sequence[Issue], given: Sequence[Given | None]) -> Mapping[str, Any]:
        try:
            return await self._put(issues, given)
        except ServiceError as error:
            if error.code != "full" or not await self._forget_lost():
                raise
        return await self._put(issues, given)

    async def _put(self, issues: Sequence[Issue], given: Sequence[Given | None]) -> Mapping[str, Any]:
        first, limit_s = self._groups, self.config.service.call_timeout_s
        groups = [self._group(first + i, *each) for i, each in enumerate(zip(issues, given))]
        sizes = [[_bytes(row) for row in group] for group in groups]
        with self._room(sum(map(len, groups)), sum(map(sum, sizes))):
            self._groups += len(groups)
            handles = await self.dock.run(self.dock.client.put_groups, self.dock.partition, groups, limit_s)
            for number, (rows, each) in enumerate(zip(handles, sizes), first):
                self._rows |= {row: (number, size) for row, size in zip(rows.tolist(), each)}
        for g, rows in zip(given, handles):
            if g is not None and g.rewards is not None and (scored := ~np.isnan(g.rewards)).any():
                values = {"score": g.rewards.astype(np.float32), "reward": g.rewards.astype(np.float32)}
                values |= {} if g.advantages is None else {"advantage": g.advantages.astype(np.float32)}
                written = {name: of_rows[scored] for name, of_rows in values.items()}
                await self.dock.run(self.dock.client.write, rows[scored], written)
        return {"accepted": len(groups), "first": first, "queued": len(self._rows)}

    def _group(self, number: int, issue: Issue, given: Given | None) -> list[PromptRow]:
        size = self.config.algorithm.group_size
        answers = [None] * size if given is None else given.answers
        each = (issue.prompt_ids, issue.truth, 0, number, issue.fields)
        return [PromptRow(number, member, size, *each, answer) for member, answer in enumerate(answers)]

    @contextlib.contextmanager
    def _room(self, rows: int, size: int) -> Iterator[None]:
        """Held while they are on their way into the dock, so that calls at the same time do not all find it free."""
        s, (have, filled) = self.config.service, self._held()
        if have + rows > s.tenant_rows:
            raise ServiceError(
                507, "full", f"you have {have} rows, and {rows} more would be above service.tenant_rows "
                f"({s.tenant_rows}): finish the task train of some, which frees them"
            )  # fmt: skip
        if filled + size > s.tenant_mb << 20:
            raise ServiceError(
                507, "full", f"your rows have {filled} bytes, and {size} more would be above "
                f"service.tenant_mb ({s.tenant_mb}): finish the task train of some, which frees them"
            )  # fmt: skip
        self._coming_rows, self._coming_bytes = self._coming_rows + rows, self._coming_bytes + size
        try:
            yield
        finally:
            self._coming_rows, self._coming_bytes = self._coming_rows - rows, self._coming_bytes - size

    def _held(self) -> tuple[int, int]:
        """Rows and bytes, with those on their way into the dock."""
        return len(self._rows) + self._coming_rows, sum(size for _, size in self._rows.values()) + self._coming_bytes

    async def _forget_lost(self) -> int:
        """How many rows the dock had no more: a pair of it was started again."""
        known = sorted({group for group, _ in self._rows.values()})
        gone = set(await self.dock.missing(known))
        lost = [row for row, (group, _) in self._rows.items() if group in gone]
        for row in lost:
            self._rows.pop(row)
        return len(lost)

    # ---- rows are worked on ------------------------------------------------------------------------------------------

    async def get(self, task: str, columns: Sequence[str], groups: int, timeout_s: float) -> Experience:
        if task not in (tasks := self.dock.client.schema.tasks):
            raise ServiceError(404, "unknown_task", f"there is no task {task!r:.40}; there are {', '.join(tasks)}")
        read, until = columns_of(columns, self.session, self.dock), now() + timeout_s
        while True:
            try:
                slice_s = max(0.0, min(SLICE_S, until - now()))
                claim = await self.dock.claim(task, groups, worker=self.worker, timeout_s=slice_s)
            except DeadlineExceeded:
                if now() >= until:
                    return NOTHING
                continue
            if len(claim.rows):
                break
        self._granted(task, claim)
        try:
            values = await read(claim.rows)
        except BaseException:
            await self.release(claim.claim_id)
            raise
        return Experience(claim.claim_id, claim.rows, claim.group_ids, claim.members, values)

    def _granted(self, task: str, claim: Claim) -> None:
        """Claims before it that had one of its rows for this task have ended with their lease."""
        again = set(claim.rows.tolist())
        ended = [n for n, (of, held) in self._claims.items() if of == task and not again.isdisjoint(held.rows.tolist())]
        for number in ended:
            del self._claims[number]
        self._claims[claim.claim_id] = task, claim

    async def release(self, claim: int) -> None:
        if self._claims.pop(claim, None) is not None:
            await self.dock.release(claim)

    async def put(self, claim: int, rows: np.ndarray, columns: Mapping[str, Column]) -> Mapping[str, Any]:
        if claim not in self._claims:
            raise ServiceError(404, "unknown_claim", f"you hold no claim {claim}")
        task, held = self._claims[claim]
        named = rows.tolist()
        if len(set(named)) != len(named) or not set(named) <= set(held.rows.tolist()) or not named:
            raise ServiceError(422, "rows", f"the rows are not those of claim {claim}, or one is named twice")
        values = {name: cast(name, column, len(named)) for name, column in columns.items()}
        return await _to_its_end(self._written(claim, task, rows, values))

    async def _written(self, claim: int, task: str, rows: np.ndarray, values: Mapping[str, Any]) -> Mapping[str, Any]:
        client, limit_s, named = self.dock.client, self.config.service.call_timeout_s, rows.tolist()
        size = sum(sum(x.nbytes for x in value) for value in values.values())
        with self._room(0, size):
            try:
                if values:
                    await self.dock.run(client.write, rows, values, claim_id=claim, done=True, timeout_s=limit_s)
                else:
                    await self.dock.run(client.done, claim, rows=rows)
            except (StaleHandle, ClaimLost) as error:
                await self.release(claim)
                gone = await self._forget_lost()
                raise ClaimLost(f"{error}" + f"; the dock has lost {gone} of your rows" * bool(gone)) from error
            for row in named:
                if row in self._rows:
                    group, before = self._rows[row]
                    self._rows[row] = group, before + size // len(named)
        left = self._finished(claim, rows)
        if task == "train":
            await self.dock.free(rows)
            for row in named:
                self._rows.pop(row, None)
        return {"left": left}

    def _finished(self, claim: int, rows: np.ndarray) -> int:
        """Rows that the claim has still; another call may have finished some meanwhile."""
        if claim not in self._claims:
            return 0
        task, held = self._claims.pop(claim)
        left = held.rows[~np.isin(held.rows, rows)]
        if len(left):
            self._claims[claim] = task, _only(held, left)
        return len(left)

    async def status(self) -> Mapping[str, Any]:
        stats = await self.dock.stats()
        mine = stats["partitions"].get(self.dock.partition, {})
        rows, size = self._held()
        return {"rows": rows, "bytes": size, "tasks": mine.get("tasks", {})}


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """What a thread writes into the dock is counted, also where whoever asked for it is gone meanwhile."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


def _bytes(row: PromptRow) -> int:
    answer = 0
    if row.answer is not None:
        mask = 0 if row.answer.mask is None else row.answer.mask.nbytes
        answer = row.answer.token_ids.nbytes + row.answer.logprobs.nbytes + mask
    shared = row.prompt_ids.nbytes + len(row.truth.encode()) + len(row.fields.encode())
    return ROW_BYTES + answer + (shared if row.member == 0 else 0)


def _only(claim: Claim, rows: np.ndarray) -> Claim:
    kept = np.isin(claim.rows, rows)
    return Claim(
        claim.claim_id, claim.rows[kept], claim.group_ids[kept], claim.members[kept], claim.version_min[kept],
        claim.version_max[kept], claim.tokens[kept], [], claim.sealed,
    )  # fmt: skip
