"""A bounded pool of environment processes, with a deadline for each reply that really ends the work.

Every process has a thread of the pool that serves it: a call waits until one is free, and then only for its own reply.
"""

from __future__ import annotations

import queue
import select
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_asyncflow.environments.base import Turn
from mindspeed_asyncflow.errors import DeadlineExceeded, RewardError
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.rewards.process import START_S, ScorerProcess

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import TurnsConfig

_SHOWN = 5  # failures of each kind that are warnings

logger = get_logger("environments")


class Reply(NamedTuple):
    text: str | None  # None: the conversation is over
    error: str = ""  # why there is no reply


class EnvironmentProcess(ScorerProcess):
    module = "mindspeed_asyncflow.environments.worker"
    kind = "environment"


_Job = tuple[list[Any], "Future[Reply]"]


class EnvironmentPool:
    """`turns.workers` processes with the environment of `turns`. Thread-safe.

    An environment that raises, dies, or takes longer than `turns.timeout_s` gives a `Reply` with an error, counted in
    `counts` and logged; its process is ended and replaced where it hangs. Raises `RewardError` if none can start.
    """

    def __init__(self, turns: TurnsConfig) -> None:
        self._spec = {"name": turns.environment, "options": dict(turns.options)}
        self._timeout_s = turns.timeout_s
        self.counts: Counter[str] = Counter(replied=0, over=0, failed=0, timed_out=0, died=0)
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        started: list[Future[None]] = [Future() for _ in range(turns.workers)]
        # The kernel ends a process when the *thread* that started it ends, so each is started by the one it serves.
        self._threads = [
            threading.Thread(target=self._serve, args=(future,), name=f"environment{i}", daemon=True)
            for i, future in enumerate(started)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for future in started:
                future.result(START_S)
        except BaseException:
            self.close()
            raise

    def ask(self, turns: Sequence[Turn], truth: str, fields: dict[str, Any]) -> Future[Reply]:
        """The reply to these turns. The future has an exception only if the pool is closed or cannot go on."""
        asked: Future[Reply] = Future()
        if self._closed:
            asked.set_exception(RewardError("the pool of environments is closed"))
        else:
            self._jobs.put(([turns, truth, fields], asked))
        return asked

    def close(self) -> None:
        """End all processes; none is left when this returns. A reply that is under way is still waited for."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(START_S)
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            if job is not None and job[1].set_running_or_notify_cancel():
                job[1].set_exception(RewardError("the pool of environments is closed"))

    def _serve(self, started: Future[None]) -> None:
        """Main loop of a thread: one process, one job at a time."""
        process: EnvironmentProcess | None = None
        try:
            try:
                process = self._start()
            except BaseException as error:  # boundary: the constructor raises it
                started.set_exception(error)
                return
            started.set_result(None)
            while (job := self._jobs.get()) is not None:
                item, asked = job
                if not asked.set_running_or_notify_cancel():
                    continue
                try:
                    process = self._reply(process or self._start(), item, asked)
                except BaseException as error:  # boundary: whoever waits for this reply learns why there is none
                    process = None
                    asked.set_exception(error)
        finally:
            if process is not None:
                process.kill()

    def _reply(self, process: EnvironmentProcess, item: list[Any], asked: Future[Reply]) -> EnvironmentProcess | None:
        """Carry out one job; the process for the next one, None where it is gone."""
        try:
            process.give([0], [item])
        except OSError:  # it died while idle
            process.kill()
            process = self._start()
            process.give([0], [item])
        deadline = time.monotonic() + self._timeout_s
        while (left := deadline - time.monotonic()) > 0 and _readable(process, left):
            replies = process.receive()
            if replies is None:
                process.kill()
                asked.set_result(self._failure("died", "its process died"))
                return None
            for _, (text, error, _) in replies:
                asked.set_result(self._failure("failed", error) if error else self._count(text))
                return process
        process.kill()
        asked.set_result(self._failure("timed_out", f"no reply within {self._timeout_s:g} s (turns.timeout_s)"))
        return None

    def _count(self, text: Any) -> Reply:
        with self._lock:
            self.counts["over" if text is None else "replied"] += 1
        return Reply(text)

    def _failure(self, kind: str, error: str) -> Reply:
        with self._lock:
            self.counts[kind] += 1
            shown = self.counts[kind] <= _SHOWN
        (logger.warning if shown else logger.debug)("environment %s: %s", self._spec["name"], error)
        return Reply(None, error)

    def _start(self) -> EnvironmentProcess:
        process = EnvironmentProcess(self._spec)
        deadline = time.monotonic() + START_S
        try:
            while not process.ready:
                if not _readable(process, max(0.0, deadline - time.monotonic())):
                    raise DeadlineExceeded(f"waited {START_S:g} s for an environment process to start")
                if process.receive() is None:
                    raise RewardError("an environment process ended while starting")
        except BaseException:
            process.kill()
            raise
        return process


def _readable(process: EnvironmentProcess, patience_s: float) -> bool:
    poll = select.poll()
    poll.register(process.channel, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))
