"""The part that all in-process rollout engines share: one thread that owns the model and works between token steps.

    callers (any thread)                       engine thread
      generate() -- requests ------------->  admit as one batch
      pause / update / abort / score ----->  run between two steps, never inside one
      iterator  <-- completions of a step --  step(): one token for every running request

Because nothing happens inside a step, the number of tokens that a request has at an update is exact, and so are the
version spans. A concrete engine is a `StepBackend`: what a step, a weight load or an abort means for its model.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from mindspeed_asyncflow.engines import lifecycle as states
from mindspeed_asyncflow.engines.base import EngineCaps
from mindspeed_asyncflow.engines.lifecycle import Lifecycle, SpanTrack, check_resume
from mindspeed_asyncflow.errors import DeadlineExceeded, EngineError, WeightSyncError
from mindspeed_asyncflow.records import Completion, GenRequest, UpdateReport, WeightManifest

T = TypeVar("T")
_IDLE_WAIT_S = 5.0  # the engine thread looks around this often when nobody wakes it


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that left the model: what was sampled since it was admitted (resumed tokens not included)."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reason: str  # stop | length | abort | error


class StepBackend(Protocol):
    """One model and its running requests. Called from the engine thread only."""

    caps: EngineCaps

    def check(self, request: GenRequest) -> None:
        """Raise `EngineError` if this request can never run. Called from the caller's thread."""
        ...

    def admit(self, requests: Sequence[GenRequest]) -> None: ...

    def step(self) -> list[Finished]:
        """Sample one token for each running request; return those that are complete now."""
        ...

    def progress(self) -> dict[str, int]:
        """Tokens sampled so far for each unfinished request."""
        ...

    def abort(self, request_ids: Sequence[str]) -> list[Finished]: ...

    def load(self, manifest: WeightManifest) -> str:
        """Replace all weights; return the fingerprint of the bytes that were loaded."""
        ...

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Raise `WeightSyncError` if names or shapes do not fit this model. Changes nothing."""
        ...

    def clear_caches(self) -> None:
        """Drop every cached key and value; running requests compute theirs again. Raises if that fails."""
        ...

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]: ...

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class _Ticket:
    """One `generate` call: its unfinished requests and the mailbox of its answers."""

    def __init__(self, requests: Sequence[GenRequest]) -> None:
        self.requests = requests
        self.open = {r.request_id for r in requests}
        self.answers: queue.SimpleQueue[list[Completion] | BaseException] = queue.SimpleQueue()


class SteppedEngine:
    """A `RolloutEngine` on top of a `StepBackend`.

    `build` makes the backend inside the engine thread (thread pools belong to the thread that makes them);
    `command_timeout_s` is the deadline of every call but `generate`, which has its own.
    """

    def __init__(self, name: str, build: Callable[[], StepBackend], *, start_timeout_s: float, command_timeout_s: float):
        self._name = name
        self._life = Lifecycle()
        self._timeout_s = command_timeout_s
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._ended = False  # the thread reads no inbox any more
        self._held: deque[GenRequest] = deque()  # wait for resume
        self._tickets: dict[str, _Ticket] = {}
        self._requests: dict[str, GenRequest] = {}  # admitted or held
        self._tracks: dict[str, SpanTrack] = {}
        self._running = 0  # admitted and unfinished
        self._draining: Future[None] | None = None
        self._failure: BaseException | None = None
        self._closing = False
        started: Future[StepBackend] = Future()
        self._thread = threading.Thread(target=self._main, args=(build, started), name=f"{name}-engine", daemon=True)
        self._thread.start()
        self._backend = self._await(started, "start", start_timeout_s)

    # ---- callers -------------------------------------------------------------------------------------------------

    def capabilities(self) -> EngineCaps:
        return self._backend.caps

    @property
    def version(self) -> int:
        return self._life.version

    @property
    def state(self) -> str:
        return self._life.state

    def generate(self, requests: Sequence[GenRequest], timeout_s: float) -> Iterator[Completion]:
        """See `RolloutEngine.generate`. Requests are admitted by this call, not by the first `next`.

        Raises `DeadlineExceeded` when `timeout_s` ends first; the unfinished requests are aborted then, as they are
        when the caller drops the iterator.
        """
        deadline = time.monotonic() + timeout_s
        self._check_alive()
        self._life.require("generate", states.RUNNING, states.PAUSED, states.UPDATING, states.SLEEPING)
        for request in requests:
            self._check_request(request)
        ticket = _Ticket(tuple(requests))
        with self._wake:
            used = ticket.open & self._tickets.keys()
            if used or len(ticket.open) < len(ticket.requests):
                raise EngineError(f"request ids must be unique; in use or given twice: {sorted(used)[:3] or 'in this call'}")
            self._tickets.update(dict.fromkeys(ticket.open, ticket))
        try:
            self._post(lambda: self._receive(ticket.requests))
        except EngineError:
            with self._wake:
                for request_id in ticket.open:
                    del self._tickets[request_id]
            raise
        return self._collect(ticket, deadline, timeout_s)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._call("abort", lambda: self._abort(request_ids))

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        if mode not in self._backend.caps.pause_modes:
            raise EngineError(f"pause mode {mode!r} is unknown; {self._name} has {', '.join(self._backend.caps.pause_modes)}")
        if mode == "wait":
            drained: Future[None] = Future()
            self._call("pause", lambda: self._drain(drained))
            try:
                self._await(drained, "pause (wait)", self._timeout_s)
            except DeadlineExceeded:
                self._call("pause", lambda: self._stop_draining("it took too long"))
                raise
            self._call("pause", lambda: self._backend.clear_caches() if clear_cache else None)
            return
        self._call("pause", lambda: self._pause_now(mode, clear_cache))

    def resume(self) -> None:
        self._call("resume", self._resume)

    def update(self, manifest: WeightManifest) -> UpdateReport:
        return self._call("update", lambda: self._update(manifest))

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """See `RolloutEngine.score`. Possible while RUNNING, and while PAUSED with no request frozen in the model."""
        return self._call("score", lambda: self._score(sequences))

    def reset_prefix_cache(self) -> None:
        self._call("reset of the prefix cache", self._backend.clear_caches)

    def sleep(self, level: int = 1) -> None:
        if level not in self._backend.caps.sleep_levels:
            raise EngineError(f"sleep level {level} is unknown; {self._name} has {self._backend.caps.sleep_levels}")
        self._call("sleep", lambda: self._sleep(level))

    def wake(self) -> None:
        self._call("wake", self._wake_up)

    def close(self) -> None:
        """Abort everything, free the model and end the thread. May be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"{self._name}: the engine thread did not end within {self._timeout_s} s")

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def _await(self, future: Future[T], verb: str, timeout_s: float) -> T:
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:
            if future.done():  # the call itself raised a timeout
                raise
            raise DeadlineExceeded(f"{self._name}: {verb} got no answer from the engine thread in {timeout_s} s") from error

    def _call(self, verb: str, action: Callable[[], T]) -> T:
        """Run `action` in the engine thread between two steps and return what it returns."""
        self._check_alive()
        future: Future[T] = Future()

        def run() -> None:
            try:
                self._check_alive()
                future.set_result(action())
            except BaseException as error:  # boundary: the caller's thread gets it
                future.set_exception(error)

        self._post(run)
        return self._await(future, verb, self._timeout_s)

    def _post(self, item: Callable[[], None]) -> None:
        with self._wake:
            if self._ended:
                raise EngineError(f"{self._name} has ended")
            self._inbox.append(item)
            self._wake.notify()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(f"{self._name} broke: {self._failure!r}") from self._failure
        if self._closing:
            raise EngineError(f"{self._name} is closed")

    def _check_request(self, request: GenRequest) -> None:
        resumed = 0 if request.resume_ids is None else len(request.resume_ids)
        given = 0 if request.resume_logprobs is None else len(request.resume_logprobs)
        check_resume(request.request_id, resumed, given, request.resume_spans)
        if len(request.prompt_ids) == 0:
            raise EngineError(f"request {request.request_id}: the prompt is empty")
        if request.sampling.max_tokens <= resumed:
            raise EngineError(
                f"request {request.request_id}: {resumed} resumed tokens leave nothing of "
                f"max_tokens={request.sampling.max_tokens} to generate"
            )
        self._backend.check(request)

    def _collect(self, ticket: _Ticket, deadline: float, timeout_s: float) -> Iterator[Completion]:
        try:
            while ticket.open:
                try:
                    answers = ticket.answers.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise DeadlineExceeded(
                        f"{self._name}: {len(ticket.open)} of {len(ticket.requests)} answers are not complete after "
                        f"{timeout_s} s (engine {self.state}); raise rollout.timeout_s or lower rollout.max_new_tokens"
                    ) from None
                if isinstance(answers, BaseException):
                    ticket.open.clear()
                    raise EngineError(f"{self._name} broke while generating: {answers!r}") from answers
                for answer in answers:
                    ticket.open.discard(answer.request_id)
                    yield answer
        finally:
            if ticket.open and not self._closing and self._failure is None:
                self.abort(tuple(ticket.open))

    # ---- engine thread ---------------------------------------------------------------------------------------------

    def _main(self, build: Callable[[], StepBackend], started: Future[StepBackend]) -> None:
        try:
            backend = build()
        except BaseException as error:  # boundary: the constructor raises it
            self._failure = error
            started.set_exception(error)
            return
        self._backend = backend
        started.set_result(backend)
        try:
            while not self._closing:
                self._turn()
            self._abort(None)
        except BaseException as error:  # boundary: the model broke; every caller learns why
            self._failure = error
            self._stop_draining(f"the engine broke: {error!r}")
        finally:
            with self._wake:
                self._ended = True
            self._run_inbox()
            for ticket in set(self._tickets.values()):
                ticket.answers.put(self._failure or EngineError(f"{self._name} was closed"))
            backend.close()

    def _turn(self) -> None:
        """Answer all calls, then one step if there is something to step."""
        busy = self._running > 0 and self._life.state == states.RUNNING
        if not busy:
            with self._wake:
                if not self._inbox and not self._closing:
                    self._wake.wait(_IDLE_WAIT_S)
        self._run_inbox()
        if self._life.state == states.RUNNING and self._running:
            self._deliver(self._backend.step())
        if self._draining is not None and not self._running:
            drained, self._draining = self._draining, None
            self._life.pause()
            drained.set_result(None)

    def _run_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _receive(self, requests: Sequence[GenRequest]) -> None:
        if self._ended:
            return
        for request in requests:
            self._requests[request.request_id] = request
        if self._life.state == states.RUNNING and self._draining is None:
            self._admit(requests)
        elif self._life.state == states.DIRTY:  # it broke after the caller's check
            self._deliver([Finished(r.request_id, (), (), "abort") for r in requests], admitted=False)
        else:
            self._held.extend(requests)

    def _admit(self, requests: Sequence[GenRequest]) -> None:
        for request in requests:
            self._tracks[request.request_id] = SpanTrack(request.resume_spans)
        self._running += len(requests)
        self._backend.admit(requests)

    def _deliver(self, finished: Sequence[Finished], admitted: bool = True) -> None:
        """Turn what the model finished into `Completion`s and put them into their callers' mailboxes."""
        if not finished:
            return
        per_ticket: dict[_Ticket, list[Completion]] = {}
        for done in finished:
            request = self._requests.pop(done.request_id)
            track = self._tracks.pop(done.request_id, None) or SpanTrack(request.resume_spans)
            ids = np.asarray(done.token_ids, dtype=np.int32)
            logprobs = np.asarray(done.logprobs, dtype=np.float32)
            if request.resume_ids is not None and len(request.resume_ids):
                ids = np.concatenate([np.asarray(request.resume_ids, dtype=np.int32), ids])
                logprobs = np.concatenate([np.asarray(request.resume_logprobs, dtype=np.float32), logprobs])
            track.cut(self._life.version, len(ids))
            completion = Completion(done.request_id, ids, logprobs, done.reason, tuple(track.spans))
            per_ticket.setdefault(self._tickets[done.request_id], []).append(completion)
        if admitted:
            self._running -= len(finished)
        with self._wake:
            for done in finished:
                del self._tickets[done.request_id]
        for ticket, answers in per_ticket.items():
            ticket.answers.put(answers)

    def _abort(self, request_ids: Sequence[str] | None) -> None:
        """End requests with what they have; ids that are already complete are ignored."""
        wanted = set(self._requests) if request_ids is None else set(request_ids) & set(self._requests)
        held = [r.request_id for r in self._held if r.request_id in wanted]
        if held:
            self._held = deque(r for r in self._held if r.request_id not in wanted)
            self._deliver([Finished(i, (), (), "abort") for i in held], admitted=False)
        running = [i for i in self._requests if i in wanted]
        if running:
            self._deliver(self._backend.abort(running))

    def _pause_now(self, mode: str, clear_cache: bool) -> None:
        self._life.pause()
        self._stop_draining(f"pause ({mode}) overtook it")
        if mode == "abort":
            self._abort(None)
        if clear_cache:
            self._backend.clear_caches()

    def _drain(self, drained: Future[None]) -> None:
        self._life.require("pause", states.RUNNING)
        if self._draining is not None:
            raise EngineError("pause is already waiting for running requests")
        self._draining = drained

    def _stop_draining(self, why: str) -> None:
        """A pause that waits for running requests ends without success."""
        if self._draining is not None:
            self._draining.set_exception(EngineError(f"{self._name}: pause (wait) was given up: {why}"))
            self._draining = None
            if self._life.state == states.RUNNING and self._failure is None:
                self._admit_held()

    def _resume(self) -> None:
        self._life.resume()
        self._admit_held()

    def _admit_held(self) -> None:
        if self._held:
            held, self._held = tuple(self._held), deque()
            self._admit(held)

    def _update(self, manifest: WeightManifest) -> UpdateReport:
        self._backend.check_manifest(manifest)
        self._life.begin_update(manifest.version)
        for request_id, sampled in self._backend.progress().items():
            resumed = self._requests[request_id].resume_ids
            self._tracks[request_id].cut(self._life.version, sampled + (0 if resumed is None else len(resumed)))
        start = time.monotonic()
        try:
            fingerprint = self._backend.load(manifest)
            if fingerprint != manifest.fingerprint:
                raise WeightSyncError(f"loaded bytes have fingerprint {fingerprint}, published {manifest.fingerprint}")
            self._backend.clear_caches()
        except Exception as error:  # boundary: half-loaded weights must never serve
            self._life.fail_update()
            self._stop_draining("an update failed")
            self._abort(None)
            raise WeightSyncError(
                f"{self._name}: loading weight version {manifest.version} failed ({error}); the engine is DIRTY, its "
                "requests were aborted, and only a complete update or a restart brings it back"
            ) from error
        self._life.end_update(manifest.version)
        return UpdateReport(manifest.version, time.monotonic() - start, fingerprint)

    def _score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        self._life.require("score", states.RUNNING, states.PAUSED)
        if self._life.state == states.PAUSED and self._running:
            raise EngineError(f"score would advance {self._running} frozen requests; resume or abort them first")
        for prompt, response in sequences:
            if len(prompt) == 0 or len(response) == 0:
                raise EngineError("score needs at least one prompt token and one response token per sequence")
        return self._backend.score(sequences)

    def _sleep(self, level: int) -> None:
        self._life.require("sleep", states.PAUSED)
        if self._running:
            raise EngineError(f"sleep would lose the keys and values of {self._running} frozen requests; abort them first")
        self._backend.sleep(level)
        self._life.sleep()

    def _wake_up(self) -> None:
        self._life.require("wake", states.SLEEPING)
        self._backend.wake()
        self._life.wake()
