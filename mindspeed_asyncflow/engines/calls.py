"""Calls from many threads, answered by the one thread that owns the model."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from mindspeed_asyncflow.errors import DeadlineExceeded, EngineError

T = TypeVar("T")


class CallQueue:
    """Actions wait here until the owning thread runs them. `end` makes every later and every waiting call fail."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._changed = threading.Condition()
        self._actions: deque[Callable[[], None]] = deque()
        self._ended: str = ""

    def post(self, action: Callable[[], None]) -> None:
        """Queue `action` and return. Raises `EngineError` after `end`."""
        with self._changed:
            if self._ended:
                raise EngineError(f"{self._owner}: {self._ended}")
            self._actions.append(action)
            self._changed.notify()

    def call(self, verb: str, action: Callable[[], T], timeout_s: float) -> T:
        """Run `action` in the owning thread and return its result or raise its error."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                if self._ended:
                    raise EngineError(f"{self._owner}: {verb} was not answered: {self._ended}")
                future.set_result(action())
            except BaseException as error:  # boundary: the caller's thread gets it
                future.set_exception(error)

        self.post(run)
        return self.await_result(future, verb, timeout_s)

    def await_result(self, future: Future[T], verb: str, timeout_s: float) -> T:
        """`future.result`, with a `DeadlineExceeded` that says who did not answer."""
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:
            if future.done():  # the action itself raised a timeout
                raise
            raise DeadlineExceeded(f"{self._owner}: {verb} got no answer in {timeout_s} s") from error

    def nudge(self) -> None:
        """Wake the owning thread although there is nothing to run."""
        with self._changed:
            self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        """Owning thread: sleep until there is something to run, a nudge, or the time is over."""
        with self._changed:
            if not self._actions:
                self._changed.wait(timeout_s)

    def run_all(self) -> None:
        """Owning thread: run everything that waits, in order."""
        while self._actions:
            self._actions.popleft()()

    def end(self, why: str) -> None:
        """Owning thread, last act: refuse new calls and answer those that wait with an error."""
        with self._changed:
            self._ended = why
        self.run_all()
