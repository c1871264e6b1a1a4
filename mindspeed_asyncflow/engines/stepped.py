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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch

from mindspeed_asyncflow.engines import lifecycle as states
from mindspeed_asyncflow.engines.base import EngineCaps, Stream
from mindspeed_asyncflow.engines.calls import CallQueue
from mindspeed_asyncflow.engines.lifecycle import Lifecycle
from mindspeed_asyncflow.engines.step_backend import Finished, StepBackend, WantedWeight
from mindspeed_asyncflow.engines.tickets import Books, Ticket, check_request, check_sampled
from mindspeed_asyncflow.errors import DeadlineExceeded, EngineError, WeightSyncError
from mindspeed_asyncflow.records import Completion, GenRequest, UpdateReport, WeightManifest

T = TypeVar("T")
_IDLE_WAIT_S = 5.0  # the engine thread looks around this often when nobody wakes it


class SteppedEngine:
    """A `RolloutEngine` on top of a `StepBackend`.

    `build` makes the backend inside the engine thread (thread pools belong to the thread that makes them);
    `command_timeout_s` is the deadline of every call but `generate`, which has its own.
    """

    def __init__(
        self, name: str, build: Callable[[], StepBackend], *, start_timeout_s: float, command_timeout_s: float
    ) -> None:
        self._name = name
        self._timeout_s = command_timeout_s
        self._life = Lifecycle()
        self._calls = CallQueue(f"{name} engine")
        self._books = Books()
        self._held: dict[str, GenRequest] = {}  # wait for resume, oldest first
        self._running: set[str] = set()  # admitted and unfinished
        self._draining: Future[None] | None = None  # a pause that waits until nothing runs
        self._closing = False
        self._update_began = 0.0  # monotonic seconds
        started: Future[StepBackend] = Future()
        self._thread = threading.Thread(target=self._main, args=(build, started), name=f"{name}-engine", daemon=True)
        self._thread.start()
        self._backend = self._calls.await_result(started, "start", start_timeout_s)

    # ---- callers -----------------------------------------------------------------------------------------------------

    def capabilities(self) -> EngineCaps:
        return self._backend.caps

    @property
    def version(self) -> int:
        return self._life.version

    @property
    def fingerprint(self) -> str:
        """Of the weights of `version`; "" while those of the model folder are served."""
        return self._life.fingerprint

    @property
    def state(self) -> str:
        return self._life.state

    def generate(
        self, requests: Sequence[GenRequest], timeout_s: float, stream: Stream | None = None
    ) -> Iterator[Completion]:
        """See `RolloutEngine.generate`. This call hands the requests over, not the first `next` of its iterator.

        The iterator raises `DeadlineExceeded` when `timeout_s` ends first; unfinished requests are aborted then, and
        also when the caller drops a started iterator.
        """
        deadline = time.monotonic() + timeout_s
        self._life.require("generate", states.RUNNING, states.PAUSED, states.UPDATING, states.SLEEPING)
        for request in requests:
            check_request(request)
            self._backend.check(request)
        ticket = Ticket(requests, stream)
        self._books.open(ticket)
        try:
            self._calls.post(lambda: self._receive(ticket))
        except EngineError:
            self._books.strike(ticket)
            raise
        return self._collect(ticket, deadline, timeout_s)

    def _collect(self, ticket: Ticket, deadline: float, timeout_s: float) -> Iterator[Completion]:
        try:
            yield from ticket.collect(lambda: deadline - time.monotonic())
        except queue.Empty:
            raise DeadlineExceeded(
                f"{self._name}: {len(ticket.open)} of {len(ticket.requests)} answers are not complete after "
                f"{timeout_s} s (engine {self.state}); raise rollout.timeout_s or lower rollout.max_new_tokens"
            ) from None
        finally:
            if ticket.open and not self._closing:
                self.abort(tuple(ticket.open))

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`. Ids of answers that are already complete are ignored."""
        self._call("abort", lambda: self._abort(request_ids))

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        """See `RolloutEngine.pause`. "wait" raises `DeadlineExceeded` and goes on running if answers take too long."""
        if mode not in self._backend.caps.pause_modes:
            raise EngineError(f"pause mode {mode!r} is unknown; {self._name} has {self._backend.caps.pause_modes}")
        if mode != "wait":
            self._call("pause", lambda: self._pause(mode, clear_cache))
            return
        drained: Future[None] = Future()
        self._call("pause", lambda: self._drain(drained))
        try:
            self._calls.await_result(drained, "pause until running answers are complete", self._timeout_s)
        except DeadlineExceeded:
            self._call("pause", lambda: self._stop_draining("it took too long"))
            raise
        if clear_cache:
            self.reset_prefix_cache()

    def resume(self) -> None:
        self._call("resume", self._resume)

    def update(self, manifest: WeightManifest) -> UpdateReport:
        """See `RolloutEngine.update`. A manifest that does not fit the model is refused before anything changes."""
        return self._call("update", lambda: self._update(manifest))

    def go_back(self) -> None:
        """See `RolloutEngine.go_back`."""
        self._call("going back", self._go_back)

    def weights_wanted(self) -> tuple[WantedWeight, ...]:
        """Name, dtype and shape of all weights, from the engine's own model; also while it sleeps."""
        return self._backend.weights_wanted()

    def generation_buffers(self) -> dict[str, torch.Tensor]:
        """Begin an update that the caller carries out: the very weights by Hugging Face name, to be filled completely.

        A sleeping engine is woken first; then it is UPDATING, samples nothing, and waits for `loaded` or `load_failed`.
        After `sleep(2)` the contents are undefined. Raises `EngineError` where caps.transports lacks "in_place".
        """
        return self._call("generation buffers", self._begin_fill)

    def loaded(self, version: int, fingerprint: str = "") -> UpdateReport:
        """The generation buffers hold `version` completely: clear every cache and serve it.

        The fingerprint is taken from the buffers; where one is given and differs, the engine becomes DIRTY and
        `WeightSyncError` is raised.
        """
        return self._call("end of the load", lambda: self._loaded(version, fingerprint))

    def load_failed(self, why: str) -> None:
        """The generation buffers were not filled: the engine becomes DIRTY and its requests are aborted."""
        self._call("failure of the load", lambda: self._load_failed(why))

    def residual_bytes(self) -> int:
        """Bytes of weights and caches that the engine holds on the device now. While SLEEPING: what it did not free."""
        return self._call("residual bytes", self._backend.residual_bytes)

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """See `RolloutEngine.score`. Possible while RUNNING, and while PAUSED with no request frozen in the model."""
        return self._call("score", lambda: self._score(sequences))

    def reset_prefix_cache(self) -> None:
        self._call("reset of the prefix cache", lambda: self._backend.clear_caches())

    def sleep(self, level: int = 1) -> None:
        if level not in self._backend.caps.sleep_levels:
            raise EngineError(f"sleep level {level} is unknown; {self._name} has {self._backend.caps.sleep_levels}")
        self._call("sleep", lambda: self._sleep(level))

    def wake(self) -> None:
        self._call("wake", self._wake)

    def close(self) -> None:
        """Abort everything, free the model and end the thread. May be called twice."""
        self._closing = True
        self._calls.nudge()
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"{self._name}: the engine thread did not end within {self._timeout_s} s")

    def _call(self, verb: str, action: Callable[[], T]) -> T:
        return self._calls.call(verb, action, self._timeout_s)

    # ---- engine thread -----------------------------------------------------------------------------------------------

    def _main(self, build: Callable[[], StepBackend], started: Future[StepBackend]) -> None:
        try:
            self._backend = build()
        except BaseException as error:  # boundary: the constructor raises it
            self._calls.end(f"it could not start: {error!r}")
            started.set_exception(error)
            return
        started.set_result(self._backend)
        why = "it is closed"
        try:
            while not self._closing:
                self._turn()
            self._abort(None)
        except BaseException as error:  # boundary: the model broke; every caller learns why
            why = f"it broke: {error!r}"
            self._books.fail_all(error)
        finally:
            self._closing = True
            self._stop_draining(why)
            self._calls.end(why)
            self._books.fail_all(EngineError(f"{self._name}: {why}"))
            self._backend.close()

    def _turn(self) -> None:
        """Answer all calls, then one step if there is something to step."""
        if not (self._running and self._life.state == states.RUNNING):
            self._calls.wait(_IDLE_WAIT_S)
        self._calls.run_all()
        if self._running and self._life.state == states.RUNNING:
            self._finish(self._backend.step())
            if since := self._books.due(time.monotonic()):
                self._books.show(self._backend.sampled(since), self._life.version, self._life.fingerprint)
        if self._draining is not None and not self._running:
            drained, self._draining = self._draining, None
            self._life.pause()
            drained.set_result(None)

    def _receive(self, ticket: Ticket) -> None:
        for request in ticket.requests:
            self._held[request.request_id] = request
        if self._life.state == states.RUNNING and self._draining is None:
            self._admit_held()
        elif self._life.state == states.DIRTY:  # an update failed after the caller's check
            self._abort([r.request_id for r in ticket.requests])

    def _admit_held(self) -> None:
        held, self._held = tuple(self._held.values()), {}
        if held:
            self._running.update(r.request_id for r in held)
            self._backend.admit(held)

    def _finish(self, finished: Sequence[Finished]) -> None:
        if finished:
            for done in finished:
                check_sampled(done, self._backend.token_count)
            self._running.difference_update(done.request_id for done in finished)
            self._books.deliver(finished, self._life.version, self._life.fingerprint)

    def _abort(self, request_ids: Sequence[str] | None) -> None:
        wanted = self._running | self._held.keys() if request_ids is None else set(request_ids)
        held = [i for i in self._held if i in wanted]
        for request_id in held:
            del self._held[request_id]
        running = [i for i in self._running if i in wanted]
        self._finish([Finished(i, (), (), "abort") for i in held] + (self._backend.abort(running) if running else []))

    def _go_back(self) -> None:
        self._abort(None)
        self._life.go_back()

    def _pause(self, mode: str, clear_cache: bool) -> None:
        self._life.pause()
        self._stop_draining(f"pause ({mode}) overtook it")
        if mode == "abort":
            self._abort(None)
        if clear_cache:
            self._backend.clear_caches()

    def _drain(self, drained: Future[None]) -> None:
        self._life.require("pause", states.RUNNING)
        if self._draining is not None:
            raise EngineError("another pause already waits for running answers")
        self._draining = drained

    def _stop_draining(self, why: str) -> None:
        """A pause that waits for running requests ends without success."""
        if self._draining is not None:
            self._draining.set_exception(EngineError(f"{self._name}: pause (wait) was given up: {why}"))
            self._draining = None
            if self._life.state == states.RUNNING and not self._closing:
                self._admit_held()

    def _resume(self) -> None:
        self._life.resume()
        self._admit_held()

    def _update(self, manifest: WeightManifest) -> UpdateReport:
        self._backend.check_manifest(manifest)
        self._begin_update(manifest.version)
        try:
            fingerprint = self._backend.load(manifest)
            if fingerprint != manifest.fingerprint:
                raise WeightSyncError(f"loaded bytes have fingerprint {fingerprint}, published {manifest.fingerprint}")
            return self._end_update(manifest.version, fingerprint)
        except Exception as error:  # boundary: half-loaded weights must never serve
            raise self._failed_update(f"loading weight version {manifest.version} failed ({error})") from error

    def _begin_update(self, version: int) -> None:
        self._life.begin_update(version)
        self._update_began = time.monotonic()
        self._books.cut(self._life.version, self._life.fingerprint, self._backend.progress())

    def _end_update(self, version: int, fingerprint: str) -> UpdateReport:
        self._backend.clear_caches()
        self._life.end_update(version, fingerprint)
        if self._life.state == states.RUNNING and self._draining is None:
            self._admit_held()
        return UpdateReport(version, time.monotonic() - self._update_began, fingerprint)

    def _failed_update(self, what: str) -> WeightSyncError:
        self._life.fail_update()
        self._stop_draining("an update failed")
        self._abort(None)
        return WeightSyncError(
            f"{self._name}: {what}; the engine is DIRTY, its requests were aborted, and only a complete update or a "
            "restart brings it back"
        )

    def _begin_fill(self) -> dict[str, torch.Tensor]:
        if "in_place" not in self._backend.caps.transports:
            raise EngineError(f"{self._name} places its weights itself; give it a relay version by update")
        if self._life.state == states.SLEEPING:
            self._wake()
        self._life.require("load", states.RUNNING, states.PAUSED, states.DIRTY)
        self._stop_draining("a weight load overtook it")
        buffers = self._backend.generation_buffers()
        self._begin_update(self._life.version)
        return buffers

    def _loaded(self, version: int, published: str) -> UpdateReport:
        self._life.require("end of the load", states.UPDATING)
        try:
            found = self._backend.buffers_fingerprint()
            if published and found != published:
                raise WeightSyncError(f"loaded bytes have fingerprint {found}, published {published}")
            return self._end_update(version, found)
        except Exception as error:  # boundary: half-loaded weights must never serve
            raise self._failed_update(f"taking over weight version {version} failed ({error})") from error

    def _load_failed(self, why: str) -> None:
        self._life.require("failure of the load", states.UPDATING)
        self._failed_update(why)

    def _score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        self._life.require("score", states.RUNNING, states.PAUSED)
        if self._life.state == states.PAUSED and self._running:
            raise EngineError(f"score would advance {len(self._running)} frozen requests; resume or abort them first")
        if any(len(prompt) == 0 or len(response) == 0 for prompt, response in sequences):
            raise EngineError("score needs at least one prompt token and one response token in every sequence")
        return self._backend.score(sequences)

    def _sleep(self, level: int) -> None:
        self._life.require("sleep", *states.SLEEPS_FROM[level])
        if self._running:
            raise EngineError(f"sleep would lose the cache of {len(self._running)} frozen requests; abort them first")
        self._life.sleep(level)
        try:
            self._backend.sleep(level)
        except Exception as error:  # boundary: weights that are partly gone must never serve
            self._life.sleep_failed()
            self._backend.wake()
            raise EngineError(f"{self._name}: sleep({level}) failed ({error}); the engine is DIRTY") from error

    def _wake(self) -> None:
        self._life.require("wake", states.SLEEPING)
        self._backend.wake()
        self._life.wake()
