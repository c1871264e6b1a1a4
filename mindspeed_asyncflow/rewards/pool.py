"""A bounded pool of scorer processes with a deadline for each answer.

    score() --> chunks --> idle process --> [value, error, parts] per answer, as soon as it is known
                             | silent for timeout_s: ended and replaced; its answer is named, the rest offered again
                             | slow, others idle:    they take over what it has not begun

Only ending the process really ends the work: a time-out that stops waiting leaves a spinning scorer behind.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

from mindspeed_asyncflow.errors import DeadlineExceeded, RewardError
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.process import START_S, Item, Reply, ScorerProcess
from mindspeed_asyncflow.rewards.registry import Spec

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import DataConfig, RewardConfig

_CHUNK = 64  # most answers in one message
_SHOWN = 5  # failures of each kind that the console shows; the log file has all
_SLOW_S = 0.05  # an answer that takes longer no longer holds up those behind it

logger = get_logger("rewards")


@dataclass(frozen=True, slots=True)
class Score:
    value: float | None  # None: abstained, or failed and `on_timeout` is drop
    error: str = ""  # why scoring failed; "" for a score and for an abstention
    parts: dict[str, float] = field(default_factory=dict)  # what each of several scorers gave, before its weight


class _Call:
    """The answers of one `score()` call: what is known, and what no process has been given yet."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.scores: list[Score | None] = [None] * len(items)
        self.todo: deque[list[int]] = deque()
        self.left = len(items)

    def record(self, index: int, score: Score) -> None:
        self.scores[index] = score
        self.left -= 1

    def cut(self, processes: int) -> None:
        """Chunks for `processes` to take in turn, small enough to even out."""
        indices = list(range(len(self.items)))
        size = max(1, min(_CHUNK, -(-len(indices) // (2 * processes))))
        self.todo.extend(indices[start : start + size] for start in range(0, len(indices), size))


class ScorerPool:
    """Processes that score as `reward` says, or with the task of `data`. Thread-safe: calls take turns.

    A scorer that raises, returns no finite number, dies, or takes longer than `timeout_s` gives a `Score` with an
    error, counted in `counts` and logged; its value is None (`on_timeout: drop`) or 0 (`zero`).
    """

    def __init__(self, data: DataConfig, reward: RewardConfig) -> None:
        spec = Spec.of(data, reward)
        self._spec, self._in_batches = spec.plain(), spec.in_batches
        self._timeout_s = reward.timeout_s
        self._failed_value = 0.0 if reward.on_timeout == "zero" else None
        self.counts: Counter[str] = Counter(scored=0, abstained=0, failed=0, timed_out=0, died=0)
        self._lock = threading.Lock()
        # The kernel ends a scorer when the *thread* that started it ends, so one thread of the pool starts them all.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scorer-starter")
        self._selector = selectors.DefaultSelector()
        self._processes: list[ScorerProcess] = []
        try:
            for _ in range(reward.workers):
                self._start()
            self._wait_for_all(time.monotonic() + START_S)
        except BaseException:
            self.close()
            raise

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One `Score` for each answer, in order. Raises `RewardError` if a process cannot be replaced."""
        call = _Call([list(astuple(answer)) for answer in answers])
        with self._lock:
            if not self._processes:
                raise RewardError("the scorer pool is closed")
            call.cut(len(self._processes))
            try:
                while call.left:
                    self._hand_out(call)
                    for key, _ in self._selector.select(self._patience()):
                        self._take(key.data, call)
                    self._end_overdue(call)
            finally:
                # Still busy with answers that another process was faster with, or that nobody waits for any more.
                for process in [p for p in self._processes if p.outstanding]:
                    self._replace(process)
        return [score for score in call.scores if score is not None]

    def close(self) -> None:
        """End all processes; none is left when this returns."""
        with self._lock:
            for process in self._processes:
                self._selector.unregister(process.channel)
                process.kill()
            self._processes.clear()
            self._selector.close()
            self._starter.shutdown()

    def _hand_out(self, call: _Call) -> None:
        for process in [p for p in self._processes if p.idle]:
            indices = call.todo.popleft() if call.todo else self._tail_of_slowest(call)
            if not indices:
                return
            try:
                process.give(indices, call.items)
            except OSError:  # it died while idle: nothing was begun
                call.todo.appendleft(indices)
                process.outstanding.clear()
                self._replace(process)

    def _tail_of_slowest(self, call: _Call) -> list[int]:
        """Answers not begun by a process that is slow, last first: the two meet, and the first result counts."""
        now = time.monotonic()
        if self._in_batches:  # a server would be asked twice
            return []
        for process in self._processes:
            slow = len(process.outstanding) > 1 and now - process.since >= _SLOW_S
            if slow and not process.tail_given_away:
                process.tail_given_away = True
                return [index for index in list(process.outstanding)[:0:-1] if call.scores[index] is None]
        return []

    def _take(self, process: ScorerProcess, call: _Call) -> None:
        was_ready = process.ready
        replies = process.receive()
        if replies is None:
            if not was_ready:
                raise RewardError(f"scorer process ended while starting, with exit code {process.kill()}")
            self._give_up(process, "died", "scorer process died", call)
            return
        for index, reply in replies:
            if call.scores[index] is None:
                call.record(index, self._judge(reply, call.items[index]))

    def _judge(self, reply: Reply, item: Item) -> Score:
        value, error, parts = reply
        if error:
            return self._failure("failed", error, item)
        self.counts["abstained" if value is None else "scored"] += 1
        return Score(value, "", parts)

    def _failure(self, kind: str, error: str, item: Item) -> Score:
        self.counts[kind] += 1
        level = logging.WARNING if self.counts[kind] <= _SHOWN else logging.DEBUG
        logger.log(level, "no score for answer %.60r: %s", item[0], error)
        return Score(self._failed_value, error)

    def _end_overdue(self, call: _Call) -> None:
        now = time.monotonic()
        for process in list(self._processes):
            if not process.ready and now - process.since > START_S:
                raise DeadlineExceeded(f"waited {START_S:g} s for a scorer process to start")
            if process.outstanding and now - process.since >= self._timeout_s:
                error = f"no score within {self._timeout_s:g} s (reward.timeout_s)"
                self._give_up(process, "timed_out", error, call)

    def _give_up(self, process: ScorerProcess, kind: str, error: str, call: _Call) -> None:
        """Record the answer that `process` was busy with as lost, offer the rest again, start another process."""
        if process.outstanding:
            current, *rest = process.outstanding
            if call.scores[current] is None:
                call.record(current, self._failure(kind, error, call.items[current]))
            again = [] if process.tail_given_away else [index for index in rest if call.scores[index] is None]
            if again:
                call.todo.append(again)
        self._replace(process)

    def _patience(self) -> float:
        """Seconds until the next deadline of any process, or until a slow one should be helped."""
        now, idle = time.monotonic(), any(p.idle for p in self._processes)
        ends = [now + START_S]
        for process in self._processes:
            if process.outstanding:
                ends.append(process.since + self._timeout_s)
                if idle and len(process.outstanding) > 1 and not (process.tail_given_away or self._in_batches):
                    ends.append(process.since + _SLOW_S)
        return max(0.0, min(ends) - now)

    def _start(self) -> None:
        process = self._starter.submit(ScorerProcess, self._spec).result(START_S)
        self._processes.append(process)
        self._selector.register(process.channel, selectors.EVENT_READ, process)

    def _replace(self, process: ScorerProcess) -> None:
        self._processes.remove(process)
        self._selector.unregister(process.channel)
        process.kill()
        self._start()

    def _wait_for_all(self, deadline: float) -> None:
        while not all(process.ready for process in self._processes):
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"waited {START_S:g} s for scorer processes to start")
            for key, _ in self._selector.select(left):
                self._take(key.data, _Call([]))
