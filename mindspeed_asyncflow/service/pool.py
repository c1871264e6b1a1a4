"""Completions of clients at the rollout replicas: who answers, how many at a time, and what a lost replica leaves.

    request ─► waits ─► desk of the replica with most room ─► parts ─► whoever asked
                 ▲                  │ the replica is lost, goes to rest, or its answers were ended
                 └── the answer goes on elsewhere, from the tokens that it has

Training goes first: clients have a share of `rollout.max_running` only, a replica loads new weights when training wants
it to, and one on a trainer's device is left as soon as the trainer wants that back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.records import GenRequest, VersionSpan
from mindspeed_asyncflow.service.desk import LOOK_AGAIN_S, Desk
from mindspeed_asyncflow.service.verbs import CompletionPart
from mindspeed_asyncflow.workflow.clock import in_time, now
from mindspeed_asyncflow.workflow.completing import AnswerPart
from mindspeed_asyncflow.workflow.recorder import StepRecorder
from mindspeed_asyncflow.workflow.run import Run
from mindspeed_asyncflow.workflow.turns import Turns
from mindspeed_asyncflow.workflow.weight_sync import WeightSync

ATTEMPTS = 3  # an answer that an engine ends with an error is tried so often

_numbers = itertools.count()


class Serving(Protocol):
    """What the pool needs of a `Session`, asked anew each time: a restarted training group brings other ones."""

    config: Config
    sync: WeightSync
    turns: Turns
    recorder: StepRecorder
    run: Run | None


@dataclass(eq=False, slots=True)
class Answer:
    """One request on its way, with all tokens that it has."""

    place: int  # of the request in the call
    request: GenRequest
    mailbox: asyncio.Queue[CompletionPart | ServiceError]
    deadline: float  # of the loop's clock
    parts: list[AnswerPart] = field(default_factory=list)
    failures: int = 0
    over: bool = False  # nobody wants more of it
    desk: Desk | None = None

    def next_request(self) -> GenRequest:
        """What asks for the rest of the answer, under an id of its own."""
        name, parts = f"c{next(_numbers)}", [p for p in self.parts if len(p.token_ids)]
        if not parts:
            return replace(self.request, request_id=name)
        spans: list[VersionSpan] = []
        for part in parts:
            start = spans[-1].end if spans else 0
            end = start + len(part.token_ids)
            if spans and spans[-1].version == part.version:
                start = spans.pop().start
            spans.append(VersionSpan(part.version, start, end))
        return replace(
            self.request,
            request_id=name,
            resume_ids=np.concatenate([p.token_ids for p in parts]),
            resume_logprobs=np.concatenate([p.logprobs for p in parts]),
            resume_spans=tuple(spans),
        )

    def take(self, part: AnswerPart, ends: bool) -> None:
        """`ends`: the part is the last one of the answer."""
        if not ends and not len(part.token_ids):
            return
        self.parts.append(part)
        reason = part.reason if ends else None
        self.mailbox.put_nowait(CompletionPart(self.place, part.token_ids, part.logprobs, part.version, reason))
        self.over = ends

    def fail(self, error: ServiceError) -> None:
        self.over = True
        self.mailbox.put_nowait(error)


class Pool:
    """Lives in the run's event loop. `serving` gives the session as long as there is one. `share` of what a replica
    answers at the same time is for clients, `waiting`: most requests that wait for room."""

    def __init__(self, serving: Callable[[], Serving | None], share: float, waiting: int) -> None:
        self._serving, self._share, self._most_waiting = serving, share, waiting
        self._waiting: deque[Answer] = deque()
        self._desks: dict[int, Desk] = {}
        self._placing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def answers(self, requests: Sequence[GenRequest], timeout_s: float) -> AsyncIterator[CompletionPart]:
        """Parts of all answers as they come; closing the iterator ends what is not complete. Raises `ServiceError`."""
        if len(self._waiting) + len(requests) > self._most_waiting:
            raise ServiceError(
                429,
                "too_many_requests",
                f"{len(self._waiting)} completions wait for room at the replicas and at most {self._most_waiting} may "
                "(service.completions_waiting); ask again later",
            )
        mailbox: asyncio.Queue[CompletionPart | ServiceError] = asyncio.Queue()
        until = now() + timeout_s
        asked = [Answer(place, request, mailbox, until) for place, request in enumerate(requests)]
        self._waiting.extend(asked)
        self._look()
        left = len(asked)
        try:
            while left:
                try:
                    part = await in_time(mailbox.get(), max(0.0, until - now()))
                except asyncio.TimeoutError:
                    raise ServiceError(
                        504, "timeout", f"{left} of {len(asked)} completions did not end within {timeout_s:g} s"
                    ) from None
                if isinstance(part, ServiceError):
                    raise part
                left -= part.finish_reason is not None
                yield part
        finally:
            for answer in asked:
                self._drop(answer)

    def describe(self) -> dict[str, int]:
        """For `status`: completions that run and that wait."""
        return {"running": sum(len(desk) for desk in self._desks.values()), "waiting": len(self._waiting)}

    async def close(self) -> None:
        """Whoever still waits is told that the run is over."""
        tasks = [desk.task for desk in self._desks.values()] + ([self._placing] if self._placing else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_waiting()

    # ---- of desks ----------------------------------------------------------------------------------------------------

    def again(self, answer: Answer, why: str = "") -> None:
        """A replica gives no more of this answer. `why`: what its engine failed with."""
        answer.desk = None
        answer.failures += bool(why)
        if answer.over:
            return
        if answer.failures >= ATTEMPTS:
            answer.fail(ServiceError(503, "engine_error", f"a replica could not answer: {why}"))
            return
        self._waiting.appendleft(answer)
        self._look()

    def ended(self, index: int) -> None:
        """The desk of replica `index` is closed."""
        del self._desks[index]
        self._changed.set()

    def room(self) -> None:
        """A replica may have room again."""
        self._changed.set()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _drop(self, answer: Answer) -> None:
        if answer.over:
            return
        answer.over = True
        if answer.desk is not None:
            answer.desk.drop(answer)
        else:
            with contextlib.suppress(ValueError):
                self._waiting.remove(answer)

    def _look(self) -> None:
        self._changed.set()
        if self._placing is None or self._placing.done():
            self._placing = asyncio.ensure_future(self._place())

    async def _place(self) -> None:
        while self._waiting:
            self._changed.clear()
            serving = self._serving()
            if serving is None:
                self._fail_waiting()
            elif (index := self._best(serving)) is not None:
                answer = self._waiting.popleft()
                desk = self._desks.get(index)
                if desk is None:
                    desk = self._desks[index] = Desk(self, serving, index)
                desk.take(answer)
            else:
                with contextlib.suppress(asyncio.TimeoutError):  # a replica that joins says nothing here
                    await in_time(self._changed.wait(), LOOK_AGAIN_S)

    def _best(self, serving: Serving) -> int | None:
        """The replica that has least of clients to answer, then nothing of training, then the newest weights."""
        sync, turns = serving.sync, serving.turns
        limit = max(1, int(self._share * serving.config.rollout.max_running))
        there = [i for i, replica in enumerate(sync.replicas) if replica is not None]
        there = [i for i in there if not turns.shares(i)] or there

        def load(index: int) -> int:
            desk = self._desks.get(index)
            return 0 if desk is None else len(desk) if desk.is_of(serving) and not desk.closed else limit

        able = [i for i in there if load(i) < limit]
        return min(able, key=lambda i: (load(i), sync.locks[i].locked(), -sync.served[i], i), default=None)

    def _fail_waiting(self) -> None:
        while self._waiting:
            answer = self._waiting.popleft()
            answer.fail(ServiceError(503, "no_replicas", "there is no run whose replicas could answer"))
