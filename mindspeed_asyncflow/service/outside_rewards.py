"""Rewards that come from outside, in the place of the scorer worker that the loops call.

score loop ──score(rows)──► groups that wait ──get──► the client ──put──► rewards ──► rewards, advantages in the dock
                        └─► answers that came with their rewards ────────────┘
                        └─► all others: the run's scorer (service.rewards: scorer)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.observe.trace import get_tracer
from mindspeed_asyncflow.rewards.pool import Score
from mindspeed_asyncflow.service.presence import Presence
from mindspeed_asyncflow.workflow.clock import in_time, now
from mindspeed_asyncflow.workflow.given import Given
from mindspeed_asyncflow.workflow.score_worker import ScoreReport, ScoreWorker
from mindspeed_asyncflow.workflow.workers import RowBatch

UNATTENDED_S = 10.0  # who scores comes again within that time

Judged = tuple[float, float | None]  # reward (NaN: none) and advantage of one answer


class GivenScores(ScoreWorker):
    """A scorer worker that is told the scores, and perhaps the advantages, by row."""

    def __init__(self, dock: DockClient, config: Config) -> None:
        super().__init__(None, dock, lambda answers: [], config, name="scorer", tracer=get_tracer())  # type: ignore[arg-type]
        self.known: Mapping[int, Judged] = {}

    def _found(self, batch: RowBatch, columns: Mapping[str, Any]) -> list[Score]:
        rewards = [self.known[row][0] for row in batch.rows.tolist()]
        return [Score(None, "its client has no reward for it") if np.isnan(r) else Score(r) for r in rewards]

    def _chosen(self, batch: RowBatch, advantages: np.ndarray) -> np.ndarray:
        given = [self.known[row][1] for row in batch.rows.tolist()]
        return np.array([a if g is None else g for a, g in zip(advantages, given)])


@dataclass(slots=True)
class Waiting:
    """One group that waits for its rewards."""

    group: int
    rows: np.ndarray  # int64 [n]
    members: np.ndarray  # int32 [n]
    judged: dict[int, Judged] | None = None  # by row


@dataclass(slots=True)
class Held:
    """What a client has got by one call."""

    until: float  # of the loop's clock: others get it then
    groups: list[Waiting] = field(default_factory=list)


class OutsideRewards:
    """`score` and `score_answers` as of `ScoreWorker`, to be awaited. Lives in the driver's event loop.

    `scorer`: that of the run. `given` says what answers of a group came with.
    """

    def __init__(
        self,
        config: Config,
        dock: DockClient,
        presence: Presence,
        scorer: Any,
        given: Callable[[int], Given | None],
    ) -> None:
        self.config, self.presence, self.scorer, self.given = config, presence, scorer, given
        self.by_client = config.service.rewards == "client"
        self.worker = GivenScores(dock, config)
        self._waiting: dict[int, Waiting] = {}  # by group, those that no client has
        self._held: dict[int, Held] = {}  # by claim
        self._claims = itertools.count(1)
        self._getting = 0  # calls of `get` under way
        self._seen = 0.0  # when the client was last here for rewards, or the first group began to wait
        self._news = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Groups that a client could get now."""
        return len(self._waiting)

    def unattended(self, needed: Callable[[], bool] = lambda: True) -> str:
        """What nobody scores, in words: groups wait, and whoever asks this may be the one who should. Empty: somebody
        comes for them, or nothing waits, or they are not `needed`. From any thread."""
        held = sum(len(held.groups) for held in list(self._held.values()))
        alone_s = time.monotonic() - self._seen
        limit_s = UNATTENDED_S if self._waiting else self.config.service.client_timeout_s / 2
        if not (self._waiting or held) or self._getting or alone_s < limit_s or not needed():
            return ""
        return (
            f"{self.waiting + held} groups wait for your rewards, and for {alone_s:.0f} s nobody has called "
            "get_experience_data or put_experience_data"
        )

    # ---- for the loops -----------------------------------------------------------------------------------------------

    async def score(self, claim_id: int, batch: RowBatch, again: bool = False) -> ScoreReport:
        given = self._given(batch)
        outside = np.array([row in given for row in batch.rows.tolist()])
        if self.by_client and not outside.all():
            given |= await self._ask(claim_id, batch.select(~outside))
            outside[:] = True
        if not outside.any():
            return await self.scorer.score(claim_id, batch, again)
        self.worker.known = given
        mine = await asyncio.to_thread(self.worker.score, claim_id, batch.select(outside), again)
        if outside.all():
            return mine
        others = await self.scorer.score(claim_id, batch.select(~outside), again)
        scores = np.empty(len(batch))
        scores[outside], scores[~outside] = mine.scores, others.scores
        unscored, flat = mine.unscored | others.unscored, (*mine.flat, *others.flat)
        return replace(others, unscored=unscored, flat=flat, scores=tuple(scores.tolist()))

    async def score_answers(self, *answers: Any) -> Any:
        return await self.scorer.score_answers(*answers)

    def _given(self, batch: RowBatch) -> dict[int, Judged]:
        """Of rows whose answers came with rewards."""
        found: dict[int, Judged] = {}
        for row, group, member in zip(batch.rows.tolist(), batch.group_ids.tolist(), batch.members.tolist()):
            given = self.given(group)
            if given is not None and given.rewards is not None:
                advantage = None if given.advantages is None else float(given.advantages[member])
                found[row] = float(given.rewards[member]), advantage
        return found

    async def _ask(self, claim_id: int, batch: RowBatch) -> dict[int, Judged]:
        """What the client says of these rows, however long it takes: their claim does not end meanwhile."""
        groups = []
        self._seen = time.monotonic()
        for group in dict.fromkeys(batch.group_ids.tolist()):
            of_group = batch.select(batch.group_ids == group)
            groups.append(Waiting(group, of_group.rows, of_group.members))
            self._waiting[group] = groups[-1]
        self._tell()
        keeping = asyncio.ensure_future(self._keep(claim_id))
        try:
            while left := [g.group for g in groups if g.judged is None]:
                if keeping.done():
                    await keeping  # raises
                what = f"rewards of {len(left)} groups (put_experience_data)"
                await self.presence.wait(self._news, what, keeping.done)
        finally:
            keeping.cancel()
            for group in groups:
                self._withdraw(group)
        return {row: judged for g in groups for row, judged in (g.judged or {}).items()}

    async def _keep(self, claim_id: int) -> None:
        """Raises `ClaimLost` where the rows belong to somebody else now."""
        while True:
            await asyncio.sleep(self.config.dock.lease_s / 3)
            await asyncio.to_thread(self.worker.dock.renew, claim_id)

    def _withdraw(self, group: Waiting) -> None:
        self._waiting.pop(group.group, None)
        for claim, held in list(self._held.items()):
            held.groups = [g for g in held.groups if g is not group]
            if not held.groups:
                del self._held[claim]

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # ---- for the client ----------------------------------------------------------------------------------------------

    async def get(self, groups: int, timeout_s: float) -> tuple[int, list[Waiting]]:
        """Up to `groups` groups that wait, and the claim on them; 0 and none where none came in time."""
        self._getting += 1
        try:
            if not await self._some_wait(now() + timeout_s):
                return 0, []
        finally:
            self._getting, self._seen = self._getting - 1, time.monotonic()
        chosen = [self._waiting.pop(group) for group in list(self._waiting)[:groups]]
        claim = next(self._claims)
        self._held[claim] = Held(now() + self.config.dock.lease_s, chosen)
        return claim, chosen

    async def _some_wait(self, until: float) -> bool:
        self._take_back()
        while not self._waiting:
            self._take_back()
            left = until - now()
            if not self._waiting and left <= 0:
                return False
            with contextlib.suppress(asyncio.TimeoutError):
                await in_time(self._news.wait(), min(left, 1.0))
        return True

    def _take_back(self) -> None:
        """What a client has held for too long waits again."""
        for claim in [c for c, held in self._held.items() if held.until < now()]:
            self.release(claim)

    def release(self, claim: int) -> None:
        held = self._held.pop(claim, None)
        if held is not None:
            self._waiting |= {group.group: group for group in held.groups}
            self._tell()

    def put(self, claim: int, rows: np.ndarray, judged: Sequence[Judged]) -> int:
        """Rewards of all rows of the claim, or of some whole groups of it, which it holds no longer then; returns how
        many groups it holds still. Raises `ServiceError`, with nothing taken."""
        held, self._seen = self._held.get(claim), time.monotonic()
        if held is None:
            raise ServiceError(
                404, "unknown_claim", f"claim {claim} is not held: it has ended, or was held longer than dock.lease_s"
            )
        known = dict(zip(rows.tolist(), judged))
        if len(known) != len(rows):
            raise ServiceError(422, "rows", "a row is named twice")
        whole = [group for group in held.groups if set(group.rows.tolist()) <= known.keys()]
        if strange := known.keys() - {row for group in whole for row in group.rows.tolist()}:
            raise ServiceError(
                422,
                "rows",
                f"row {min(strange)} is not of claim {claim}, or its group is not whole: give all rows of it",
            )
        for group in whole:
            group.judged = {row: known[row] for row in group.rows.tolist()}
        held.groups = [group for group in held.groups if group.judged is None]
        left = len(held.groups)
        if not left:
            del self._held[claim]
        self._tell()
        return left
