"""Answers for clients outside the run, beside those that are trained: parts of them, as they are sampled.

    ask     requests go to the engine; a thread of their own takes what it gives
    news    what is new of all of them, as soon as there is anything: one caller asks again and again
    drop    they end, each with a last part whose reason is "abort"

New weights do not end them: an answer goes on, and every part says which version sampled its tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.engines.base import RolloutEngine, Stream
from mindspeed_asyncflow.records import Completion, GenRequest

PART_EVERY_S = 0.05  # running answers are shown so often


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Tokens of one answer that one version sampled; with a `reason` its end, and then there may be none."""

    request_id: str
    token_ids: np.ndarray  # int32 [l]
    logprobs: np.ndarray  # float32 [l]
    version: int
    reason: str = ""  # stop | length | abort | error
    why: str = ""  # of an error


class Completing:
    """At one replica. All methods may be called by any thread; `news` by one at a time."""

    def __init__(self, engine: RolloutEngine, name: str) -> None:
        self._engine, self._name = engine, name
        self._given: dict[str, int] = {}  # open requests -> tokens of the answer that are given out, or were resumed
        self._news: list[AnswerPart] = []
        self._changed = threading.Condition()

    def ask(self, requests: Sequence[GenRequest], timeout_s: float) -> None:
        """Raises `EngineError` where the engine refuses one; then none of them runs."""
        ids = [r.request_id for r in requests]
        with self._changed:
            self._given.update((r.request_id, 0 if r.resume_ids is None else len(r.resume_ids)) for r in requests)
        try:
            answers = self._engine.generate(requests, timeout_s, Stream(PART_EVERY_S, self._show))
        except Exception:
            self._forget(ids)
            raise
        name = f"{self._name}-completes"
        threading.Thread(target=self._collect, args=(ids, answers), name=name, daemon=True).start()

    def news(self, wait_s: float) -> list[AnswerPart]:
        """Nothing after `wait_s` where nothing comes, and at once where nothing can come."""
        with self._changed:
            self._changed.wait_for(lambda: self._news or not self._given, wait_s)
            news, self._news = self._news, []
        return news

    def drop(self, request_ids: Sequence[str]) -> None:
        self._engine.abort(request_ids)

    def _collect(self, ids: Sequence[str], answers: Iterator[Completion]) -> None:
        try:
            for answer in answers:
                self._show([answer])
        except Exception as error:  # boundary: whoever waits for these answers is told
            nothing = np.empty(0, np.int32), np.empty(0, np.float32)
            lost = [i for i in ids if i in self._given]
            self._put(AnswerPart(i, *nothing, self._engine.version, "error", str(error)) for i in lost)
        finally:
            self._forget(ids)

    def _show(self, answers: Sequence[Completion]) -> None:
        self._put(part for answer in answers for part in self._parts(answer))

    def _parts(self, answer: Completion) -> Iterator[AnswerPart]:
        name, begin, count = answer.request_id, self._given[answer.request_id], len(answer.token_ids)
        reason = "" if answer.finish_reason == "running" else answer.finish_reason
        self._given[name] = count
        for span in answer.spans:
            new = slice(max(begin, span.start), span.end)
            if new.start < new.stop:
                last = reason if span.end == count else ""
                yield AnswerPart(name, answer.token_ids[new], answer.logprobs[new], span.version, last)
        if reason:
            del self._given[name]
            if begin == count:
                yield AnswerPart(name, answer.token_ids[:0], answer.logprobs[:0], self._engine.version, reason)

    def _put(self, parts: Iterable[AnswerPart]) -> None:
        with self._changed:
            self._news += parts
            self._changed.notify_all()

    def _forget(self, ids: Sequence[str]) -> None:
        with self._changed:
            for name in ids:
                self._given.pop(name, None)
