"""The books of running answers: who asked, which version sampled which token, and where the answer goes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.engines.base import Stream
from mindspeed_asyncflow.engines.lifecycle import SpanTrack
from mindspeed_asyncflow.engines.step_backend import Finished
from mindspeed_asyncflow.errors import EngineError
from mindspeed_asyncflow.records import Completion, GenRequest


class Ticket:
    """One `generate` call: its unfinished requests and the mailbox of its answers, and of what `stream` is to get."""

    def __init__(self, requests: Sequence[GenRequest], stream: Stream | None = None) -> None:
        self.requests, self.stream = tuple(requests), stream
        self.open = {r.request_id for r in requests}
        self._shown = 0.0  # monotonic seconds
        self._answers: queue.SimpleQueue[list[Completion] | _Running | BaseException] = queue.SimpleQueue()

    def put(self, answers: list[Completion] | BaseException) -> None:
        self._answers.put(answers)

    def show(self, answers: list[Completion]) -> None:
        """What unfinished requests have."""
        self._answers.put(_Running(answers))

    def is_due(self, now: float) -> bool:
        """Whether the stream is to get something; asked and counted by the engine thread."""
        if self.stream is None:
            return False
        if not self._shown:
            self._shown = now
        due = now >= self._shown + self.stream.every_s
        if due:
            self._shown = now
        return due

    def collect(self, time_left: Callable[[], float]) -> Iterator[Completion]:
        """Answers as they come; raises `queue.Empty` when `time_left` is used up, or the error that was put."""
        while self.open:
            answers = self._answers.get(timeout=max(0.0, time_left()))
            if isinstance(answers, BaseException):
                self.open.clear()
                raise EngineError(f"the engine broke while generating: {answers!r}") from answers
            if isinstance(answers, _Running):
                assert self.stream is not None
                self.stream.take(answers.answers)
                continue
            for answer in answers:
                self.open.discard(answer.request_id)
                yield answer


@dataclass(frozen=True, slots=True)
class _Running:
    answers: list[Completion]


class Books:
    """All open requests of one engine. `open` may be called by any thread, the rest by the engine thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}
        self._tracks: dict[str, SpanTrack] = {}
        self._requests: dict[str, GenRequest] = {}
        self._shown: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # ids and log-probs that a stream has got

    def open(self, ticket: Ticket) -> None:
        """Enter a new call. Raises `EngineError` if one of its ids is in use."""
        with self._lock:
            used = sorted(ticket.open & self._tickets.keys())
            if used or len(ticket.open) < len(ticket.requests):
                where = f"{used[:3]} are running" if used else "one is given twice in this call"
                raise EngineError(f"request ids must be unique: {where}")
            for request in ticket.requests:
                self._tickets[request.request_id] = ticket
                self._requests[request.request_id] = request
                self._tracks[request.request_id] = SpanTrack(request.resume_spans)

    def strike(self, ticket: Ticket) -> None:
        """Undo `open` for a call that never reached the engine thread."""
        with self._lock:
            for request_id in ticket.open:
                self._forget(request_id)

    def cut(self, version: int, fingerprint: str, sampled: dict[str, int]) -> None:
        """All tokens that these requests have by now (`sampled` since admission) came from these weights."""
        for request_id, count in sampled.items():
            self._tracks[request_id].cut(version, count + _resumed(self._requests[request_id]), fingerprint)

    def deliver(self, finished: Sequence[Finished], version: int, fingerprint: str) -> None:
        """Make the answers, their last tokens sampled by these weights, and put them into their callers' mailboxes."""
        per_ticket: dict[Ticket, list[Completion]] = {}
        for done in finished:
            answer = self._completion(done, version, fingerprint)
            per_ticket.setdefault(self._tickets[done.request_id], []).append(answer)
        with self._lock:
            for done in finished:
                self._forget(done.request_id)
        for ticket, answers in per_ticket.items():
            ticket.put(answers)

    def due(self, now: float) -> dict[str, int]:
        """Requests of which a stream is to get something, and how many tokens since admission it has got of each."""
        with self._lock:
            tickets = [t for t in set(self._tickets.values()) if t.is_due(now)]
            names = [r.request_id for t in tickets for r in t.requests if r.request_id in self._tickets]
        return {n: len(self._shown[n][0]) - _resumed(self._requests[n]) if n in self._shown else 0 for n in names}

    def show(self, sampled: Sequence[Finished], version: int, fingerprint: str) -> None:
        """Give streams what is new of running requests, with all that they had before."""
        per_ticket: dict[Ticket, list[Completion]] = {}
        for part in sampled:
            if part.token_ids:
                name, request = part.request_id, self._requests[part.request_id]
                before = self._shown.get(name) or _begun(request)
                self._shown[name] = ids, logprobs = _joined(before, part)
                track = self._tracks[name]
                track.cut(version, len(ids), fingerprint)
                answer = Completion(name, ids, logprobs, part.reason, tuple(track.spans), track.fingerprint)
                per_ticket.setdefault(self._tickets[name], []).append(answer)
        for ticket, answers in per_ticket.items():
            ticket.show(answers)

    def fail_all(self, error: BaseException) -> None:
        """Every open call raises `error`."""
        with self._lock:
            for ticket in set(self._tickets.values()):
                ticket.put(error)

    def _forget(self, request_id: str) -> None:
        del self._tickets[request_id], self._requests[request_id], self._tracks[request_id]
        self._shown.pop(request_id, None)

    def _completion(self, done: Finished, version: int, fingerprint: str) -> Completion:
        request = self._requests[done.request_id]
        ids, logprobs = _joined(_begun(request), done)
        track = self._tracks[done.request_id]
        track.cut(version, len(ids), fingerprint)
        return Completion(done.request_id, ids, logprobs, done.reason, tuple(track.spans), track.fingerprint)


def _begun(request: GenRequest) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs that the answer had at admission."""
    if request.resume_ids is None or request.resume_logprobs is None:
        return np.empty(0, np.int32), np.empty(0, np.float32)
    return request.resume_ids.astype(np.int32), request.resume_logprobs.astype(np.float32)


def _joined(before: tuple[np.ndarray, np.ndarray], part: Finished) -> tuple[np.ndarray, np.ndarray]:
    ids, logprobs = np.asarray(part.token_ids, dtype=np.int32), np.asarray(part.logprobs, dtype=np.float32)
    return np.concatenate([before[0], ids]), np.concatenate([before[1], logprobs])


def _resumed(request: GenRequest) -> int:
    return 0 if request.resume_ids is None else len(request.resume_ids)


def check_request(request: GenRequest) -> None:
    """Raise `EngineError` for a request that no engine can serve."""
    name = f"request {request.request_id}"
    if len(request.prompt_ids) == 0:
        raise EngineError(f"{name}: the prompt is empty")
    count = _resumed(request)
    logprobs = 0 if request.resume_logprobs is None else len(request.resume_logprobs)
    if logprobs != count:
        raise EngineError(f"{name}: {count} resumed tokens but {logprobs} resumed log-probs")
    end = 0
    for span in request.resume_spans:
        if span.start != end or span.end <= span.start:
            break
        end = span.end
    if end != count:
        raise EngineError(f"{name}: resumed version spans {request.resume_spans} do not tile [0, {count})")
    if request.sampling.max_tokens <= count:
        raise EngineError(f"{name}: max_tokens={request.sampling.max_tokens} with {count} resumed tokens leaves none")


def check_sampled(done: Finished, token_count: int) -> None:
    """Raise `EngineError` for an answer that no policy gives: an id beyond the tokenizer's `token_count`, or a token
    of probability 0. What follows such a token is worthless too, so that it must not be trained."""
    ids, logprobs = np.asarray(done.token_ids, dtype=np.int64), np.asarray(done.logprobs, dtype=np.float64)
    outside, impossible = (ids < 0) | (ids >= token_count), ~np.isfinite(logprobs)
    if not outside.any() and not impossible.any():
        return
    wrong = outside if outside.any() else impossible
    place = int(wrong.argmax())
    said = f"{logprobs[place]:g}" if place < len(logprobs) else "none"
    raise EngineError(
        f"request {done.request_id}: token {place} of the answer is id {ids[place]} with log-probability {said}, where "
        f"the tokenizer has {token_count} ids; the sampler of this engine is broken (vllm-ascend before 0.27 may read "
        "noise that was freed)"
    )
