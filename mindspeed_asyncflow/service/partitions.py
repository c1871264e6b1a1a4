"""What tenants have who do not own the run: a partition of its dock for each, as a store that rows stream through.

    put_prompts_data, put_trajectories ─► rows ─► get_experience_data(task) ─► put_experience_data ─► ... ─► train: gone

Rows are in memory only: they go with the run. Everything here runs in the run's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.client import Claim
from mindspeed_asyncflow.errors import DeadlineExceeded, ServiceError
from mindspeed_asyncflow.records import PromptRow
from mindspeed_asyncflow.service.experience import NOTHING, cast, columns_of
from mindspeed_asyncflow.service.outside import Outside
from mindspeed_asyncflow.service.prompts import encoded
from mindspeed_asyncflow.service.trajectories import given_of
from mindspeed_asyncflow.service.verbs import Column, Experience, Prompt, TrajectoryGroup
from mindspeed_asyncflow.workflow.book import Issue
from mindspeed_asyncflow.workflow.clock import now
from mindspeed_asyncflow.workflow.dock_port import SLICE_S, ThreadDock

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
        self._bytes: dict[int, int] = {}  # of each row
        self._groups = 0

    # ---- rows come ---------------------------------------------------------------------------------------------------

    async def put_prompts(self, prompts: Sequence[Prompt]) -> Mapping[str, Any]:
        issues = await asyncio.to_thread(encoded, prompts, self.session.tokenizer, self.config.data)
        done = await self._put([self._rows(i, issue) for i, issue in enumerate(issues)])
        del done["handles"]
        return done

    async def put_trajectories(self, groups: Sequence[TrajectoryGroup]) -> Mapping[str, Any]:
        config, words = self.config, len(self.session.tokenizer)
        prompts = [group.prompt for group in groups]
        issues = await asyncio.to_thread(encoded, prompts, self.session.tokenizer, config.data)
        given = [given_of(g, issue.prompt_ids, config, words, ANY_VERSION) for g, issue in zip(groups, issues)]
        rows = [self._rows(i, issue, g) for i, (issue, g) in enumerate(zip(issues, given))]
        done = await self._put(rows)
        for g, handles in zip(given, done.pop("handles")):
            if g.rewards is not None:
                scored = ~np.isnan(g.rewards)
                values = {"score": g.rewards.astype(np.float32), "reward": g.rewards.astype(np.float32)}
                values |= {} if g.advantages is None else {"advantage": g.advantages.astype(np.float32)}
                if scored.any():
                    written = {name: of_rows[scored] for name, of_rows in values.items()}
                    await asyncio.to_thread(self.dock.client.write, handles[scored], written)
        return done

    def _rows(self, place: int, issue: Issue, given: Any = None) -> list[PromptRow]:
        size, group = self.config.algorithm.group_size, self._groups + place
        answers = [None] * size if given is None else given.answers
        each = (issue.prompt_ids, issue.truth, 0, group, issue.fields)
        return [PromptRow(group, member, size, *each, answer) for member, answer in enumerate(answers)]

    async def _put(self, groups: Sequence[Sequence[PromptRow]]) -> dict[str, Any]:
        count, sizes = sum(map(len, groups)), [[_bytes(row) for row in group] for group in groups]
        self._room(count, sum(map(sum, sizes)))
        first, self._groups = self._groups, self._groups + len(groups)
        limit_s = self.config.service.call_timeout_s
        put = self.dock.client.put_groups
        handles = await asyncio.to_thread(put, self.dock.partition, groups, limit_s)
        for rows, each in zip(handles, sizes):
            self._bytes |= zip(rows.tolist(), each)
        return {"accepted": len(groups), "first": first, "queued": len(self._bytes), "handles": handles}

    def _room(self, rows: int, size: int) -> None:
        s = self.config.service
        if len(self._bytes) + rows > s.tenant_rows:
            raise ServiceError(
                507, "full", f"you have {len(self._bytes)} rows, and {rows} more would be above service.tenant_rows "
                f"({s.tenant_rows}): finish the task train of some, which frees them"
            )  # fmt: skip
        if sum(self._bytes.values()) + size > s.tenant_mb << 20:
            raise ServiceError(
                507, "full", f"your rows have {sum(self._bytes.values())} bytes, and {size} more would be above "
                f"service.tenant_mb ({s.tenant_mb}): finish the task train of some, which frees them"
            )  # fmt: skip

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
        self._claims[claim.claim_id] = task, claim
        try:
            values = await read(claim.rows)
        except BaseException:
            await self.release(claim.claim_id)
            raise
        return Experience(claim.claim_id, claim.rows, claim.group_ids, claim.members, values)

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
        size = sum(sum(x.nbytes for x in value) for value in values.values())
        self._room(0, size)
        client, limit_s = self.dock.client, self.config.service.call_timeout_s
        if values:
            await asyncio.to_thread(lambda: client.write(rows, values, claim_id=claim, done=True, timeout_s=limit_s))
        else:
            await asyncio.to_thread(lambda: client.done(claim, rows=rows))
        for row in named:
            self._bytes[row] = self._bytes.get(row, 0) + size // len(named)
        left = held.rows[~np.isin(held.rows, rows)]
        self._claims[claim] = task, _only(held, left)
        if not len(left):
            del self._claims[claim]
        if task == "train":
            await self.dock.free(rows)
            for row in named:
                self._bytes.pop(row, None)
        return {"left": len(left)}

    async def status(self) -> Mapping[str, Any]:
        stats = await self.dock.stats()
        mine = stats["partitions"].get(self.dock.partition, {})
        return {"rows": len(self._bytes), "bytes": sum(self._bytes.values()), "tasks": mine.get("tasks", {})}


def _bytes(row: PromptRow) -> int:
    answer = 0 if row.answer is None else row.answer.token_ids.nbytes + row.answer.logprobs.nbytes
    shared = row.prompt_ids.nbytes + len(row.truth.encode()) + len(row.fields.encode())
    return ROW_BYTES + answer + (shared if row.member == 0 else 0)


def _only(claim: Claim, rows: np.ndarray) -> Claim:
    kept = np.isin(claim.rows, rows)
    return Claim(
        claim.claim_id, claim.rows[kept], claim.group_ids[kept], claim.members[kept], claim.version_min[kept],
        claim.version_max[kept], claim.tokens[kept], [], claim.sealed,
    )  # fmt: skip
