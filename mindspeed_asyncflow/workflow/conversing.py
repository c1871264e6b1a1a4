"""Conversations over a rollout engine: the model's turns and an environment's replies, in one answer.

    turn of the model --ended by stop--> environment --reply--> next turn, as a continuation of the same answer
          | length, abort                    | none, failed, too long for the budget, turns.max_turns
          v                                  v
                    the answer with its mask: 1 where the policy sampled, 0 where the environment wrote

An engine continues an answer from tokens, log-probabilities and version spans (as after an interruption). A reply goes
in as such tokens: log-probability 0.0, in the span of the turn before. So ids that were sampled are never encoded
again, version spans stay exact when weights change between or inside turns, and a turn draws other numbers than the
ones before it (engines draw by seed and place in the answer).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from mindspeed_asyncflow.engines.base import RolloutEngine
from mindspeed_asyncflow.environments.base import MODEL, REPLY, Turn
from mindspeed_asyncflow.environments.pool import Reply
from mindspeed_asyncflow.environments.rendering import Rendered
from mindspeed_asyncflow.errors import DataError, DeadlineExceeded, EngineError
from mindspeed_asyncflow.records import Completion, GenRequest, VersionSpan


class Asks(Protocol):
    def ask(self, turns: Sequence[Turn], truth: str, fields: dict[str, Any]) -> Future[Reply]: ...

    def close(self) -> None: ...


class Renders(Protocol):
    def render(self, prompt: Any, seen: str, turns: Sequence[Turn]) -> Rendered: ...


@dataclass
class Tally:
    """What conversations were like."""

    turns: list[int] = field(default_factory=list)  # turns of the model, of every whole answer
    replies: int = 0
    failures: int = 0  # conversations that ended because the environment failed
    cut: int = 0  # conversations that ended because a reply did not fit into the budget
    drifted: int = 0  # replies after which the chat template shows earlier turns in other words

    def add(self, other: Tally) -> None:
        self.turns += other.turns
        for name in ("replies", "failures", "cut", "drifted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def counts(self) -> dict[str, float]:
        """As metrics."""
        return {f"turns/{name}": getattr(self, name) for name in ("replies", "failures", "cut", "drifted")}


@dataclass
class _Talk:
    """One row."""

    place: int  # in the call
    request: GenRequest  # of the next turn
    truth: str
    fields: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of the environment's tokens
    answer: Completion | None = None  # so far

    def whole(self, reason: str) -> Completion:
        assert self.answer is not None
        mask = np.ones(len(self.answer.token_ids), dtype=np.uint8)
        for start, end in self.written:
            mask[start:end] = 0
        return replace(self.answer, finish_reason=reason, mask=mask)


@dataclass(frozen=True, slots=True)
class Conversation:
    """How a replica's answers become conversations.

    `decode` (ids [L] -> text, special tokens included) and `clean` (the same without the tokens that end a turn).
    `in_rounds`: the rows of a call go on together, so that the same run samples the same tokens again; else each row
    goes on as soon as its reply is there.
    """

    environment: Asks
    replies: Renders
    decode: Callable[[np.ndarray], str]
    clean: Callable[[np.ndarray], str]
    max_turns: int
    in_rounds: bool

    def answers(
        self,
        engine: RolloutEngine,
        requests: Sequence[GenRequest],
        rows: Sequence[tuple[str, dict[str, Any]]],
        *,
        timeout_s: float,
        stopped: Callable[[], bool],
        tally: Tally,
    ) -> Generator[Completion]:
        """Whole answers, each as soon as its conversation is over; `sampling.max_tokens` is the budget of all turns.

        `rows`: (truth, fields) of each request. finish_reason is "stop" where model or environment ended it, "length"
        where the budget did. Once `stopped`, conversations end with "abort". Raises `DeadlineExceeded` after
        `timeout_s`. A caller that drops the iterator ends what runs.
        """
        return _Run(self, engine, requests, rows, timeout_s, stopped, tally).answers()

    def close(self) -> None:
        self.environment.close()


class _Run:
    """One call of `Conversation.answers`."""

    def __init__(
        self,
        how: Conversation,
        engine: RolloutEngine,
        requests: Sequence[GenRequest],
        rows: Sequence[tuple[str, dict[str, Any]]],
        timeout_s: float,
        stopped: Callable[[], bool],
        tally: Tally,
    ) -> None:
        self.how, self.engine, self.stopped, self.tally = how, engine, stopped, tally
        self.timeout_s, self.deadline = timeout_s, time.monotonic() + timeout_s
        self.talks = {r.request_id: _Talk(i, r, *rows[i]) for i, r in enumerate(requests)}
        self.events: queue.SimpleQueue[Completion | tuple[_Talk, Future[Reply]] | BaseException] = queue.SimpleQueue()
        self.sampling: set[str] = set()  # in the engine
        self.asking: dict[str, Future[Reply]] = {}  # at the environment
        self.ready = list(self.talks.values())
        self.threads: list[threading.Thread] = []

    def answers(self) -> Generator[Completion]:
        try:
            while self.ready or self.sampling or self.asking:
                self._sample()
                ended = self._take(self._next())
                if ended is not None:
                    yield ended
        finally:
            self._end()

    def _sample(self) -> None:
        """Give the engine the turns that can go on, as one batch."""
        busy = self.sampling or self.asking
        if not self.ready or (busy and self.how.in_rounds) or (busy and not self.events.empty()):
            return
        batch = sorted(self.ready, key=lambda talk: talk.place)
        self.ready = []
        iterator = self.engine.generate([t.request for t in batch], timeout_s=max(0.0, self._left()))
        ids = [t.request.request_id for t in batch]
        self.sampling.update(ids)
        if self.stopped():
            self.engine.abort(ids)

        def collect() -> None:
            try:
                for answer in iterator:
                    self.events.put(answer)
            except BaseException as error:  # boundary: the thread that iterates over the answers raises it
                self.events.put(error)

        self.threads = [t for t in self.threads if t.is_alive()]
        self.threads.append(threading.Thread(target=collect, name="turns", daemon=True))
        self.threads[-1].start()

    def _next(self) -> Completion | tuple[_Talk, Future[Reply]]:
        try:
            # The engine keeps the deadline of its answers and says more about them.
            event = self.events.get(timeout=None if self.sampling else max(0.0, self._left()))
        except queue.Empty:
            raise DeadlineExceeded(
                f"{len(self.asking)} conversations wait for a reply of the environment after {self.timeout_s} s "
                "(rollout.timeout_s); raise turns.workers or lower turns.timeout_s"
            ) from None
        if isinstance(event, BaseException):
            raise event
        return event

    def _take(self, event: Completion | tuple[_Talk, Future[Reply]]) -> Completion | None:
        """The whole answer of a conversation that has ended with this."""
        if isinstance(event, Completion):
            self.sampling.discard(event.request_id)
            return self._turn_ended(self.talks[event.request_id], event)
        talk, future = event
        del self.asking[talk.request.request_id]
        return self._replied(talk, future.result())

    def _turn_ended(self, talk: _Talk, answer: Completion) -> Completion | None:
        begin = talk.written[-1][1] if talk.written else 0
        talk.answer = answer
        talk.turns.append(Turn(MODEL, self.how.clean(answer.token_ids[begin:])))
        if answer.finish_reason != "stop":
            return self._over(talk, answer.finish_reason)
        if self.stopped():
            return self._over(talk, "abort")
        if sum(t.role == MODEL for t in talk.turns) >= self.how.max_turns:
            return self._over(talk, "stop")
        asked = self.how.environment.ask(list(talk.turns), talk.truth, talk.fields)
        self.asking[talk.request.request_id] = asked
        asked.add_done_callback(lambda done: self.events.put((talk, done)))
        return None

    def _replied(self, talk: _Talk, reply: Reply) -> Completion | None:
        if self.stopped():
            return self._over(talk, "abort")
        if reply.error:
            self.tally.failures += 1
        if reply.text is None:
            return self._over(talk, "stop")
        assert talk.answer is not None
        turns = [*talk.turns, Turn(REPLY, reply.text)]
        try:
            rendered = self.how.replies.render(
                talk.fields.get("prompt", ""), self.how.decode(talk.answer.token_ids), turns
            )
        except DataError:  # a reply that the tokenizer or the template cannot express
            self.tally.failures += 1
            return self._over(talk, "stop")
        begin, count = len(talk.answer.token_ids), len(rendered.ids)
        if not count:
            return self._over(talk, "stop")
        if begin + count >= talk.request.sampling.max_tokens:
            self.tally.cut += 1
            return self._over(talk, "length")
        self.tally.replies += 1
        self.tally.drifted += rendered.drifted
        talk.turns = turns
        talk.written.append((begin, begin + count))
        talk.request = continued(talk.request, talk.answer, rendered.ids)
        self.ready.append(talk)
        return None

    def _over(self, talk: _Talk, reason: str) -> Completion:
        if reason in ("stop", "length"):
            self.tally.turns.append(sum(t.role == MODEL for t in talk.turns))
        return talk.whole(reason)

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _end(self) -> None:
        """Nothing of this call runs any more when this returns; a reply that is under way is thrown away later."""
        for asked in self.asking.values():
            asked.cancel()
        if self.sampling:
            with contextlib.suppress(EngineError):  # an engine that is gone runs nothing
                self.engine.abort(sorted(self.sampling))
        for thread in self.threads:
            thread.join(self.timeout_s)


def continued(request: GenRequest, answer: Completion, reply: np.ndarray) -> GenRequest:
    """The request of the turn after `reply` (ids [R]): all tokens so far count as sampled."""
    *before, last = answer.spans
    end = len(answer.token_ids) + len(reply)
    return replace(
        request,
        resume_ids=np.concatenate([answer.token_ids, reply]).astype(np.int32),
        resume_logprobs=np.concatenate([answer.logprobs, np.zeros(len(reply), np.float32)]),
        resume_spans=(*before, VersionSpan(last.version, last.start, end)),
    )


def turns_of(ids: np.ndarray, mask: np.ndarray, decode: Callable[[Sequence[np.ndarray]], list[str]]) -> list[Turn]:
    """The turns of a whole answer, ids and mask [L] each. Replies come with what the template puts around them.

    `decode`: ids [L] of several texts, without the tokens that end them. The last turn is always the model's.
    """
    cuts = np.flatnonzero(np.diff(mask)) + 1
    roles = [MODEL if part[0] else REPLY for part in np.split(mask, cuts)] if len(mask) else [MODEL]
    return [Turn(role, text) for role, text in zip(roles, decode(np.split(ids, cuts)))]
