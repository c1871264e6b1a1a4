"""What runs beside the engines: read rows from the dock, call the engine or scorer, write columns back.

Workers know neither Ray nor the loops. They get row handles and answer with small reports; tensors stay between the
worker and the warehouse of its node. Every method may be called from another process, so arguments and results are
plain values and records.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.engines.base import RolloutEngine, Stream
from mindspeed_asyncflow.errors import DeadlineExceeded, EngineError, WeightSyncError
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.records import Completion, GenRequest, SamplingSpec, UpdateReport, WeightManifest
from mindspeed_asyncflow.reshard.relay_mirror import PullReport, RelayMirror
from mindspeed_asyncflow.workflow.completing import Completing
from mindspeed_asyncflow.workflow.conversing import Conversation, Tally
from mindspeed_asyncflow.workflow.partial import (
    PARTIAL_COLUMNS,
    Tray,
    part_values,
    request_of,
    resumed_tokens,
    shortened,
    versions_of,
    whole_values,
)


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Claimed rows with the identity that orders and seeds them."""

    rows: np.ndarray  # int64 [n]
    group_ids: np.ndarray  # int64 [n]
    members: np.ndarray  # int32 [n]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: np.ndarray) -> RowBatch:
        return RowBatch(self.rows[index], self.group_ids[index], self.members[index])


@dataclass(frozen=True, slots=True)
class RolloutReport:
    samples: int  # complete answers
    tokens: int  # sampled in this call
    busy_s: float
    served: tuple[tuple[int, str], ...]  # (version, fingerprint) at the end of each answer, without repetition
    unfinished: tuple[int, ...] = ()  # rows that were released: a budget or a stop has ended their round
    conversations: Tally | None = None  # where an environment answers the model


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt outside the dock."""

    key: tuple[int, int]  # what its seed is made of, besides the run's; the first one is negative, unlike those of rows
    prompt_ids: np.ndarray  # int32 [P]
    truth: str = ""
    fields: str = "{}"


@dataclass(frozen=True, slots=True)
class MirrorRoute:
    """Where a node's mirror keeps versions (a path under /dev/shm), and from which relay servers it fetches them."""

    path: str
    sources: tuple[str, ...]  # host:port of the server on every node with trainer ranks
    secret: bytes = field(repr=False)
    keep: int
    timeout_s: float  # a fetch may be silent for so long
    delta: bool


def handles(answers: Sequence[Completion]) -> np.ndarray:
    """Rows of answers, int64 [n]."""
    return np.array([int(a.request_id) for a in answers], dtype=np.int64)


def sample_seed(run_seed: int, group_id: int, member: int) -> int:
    """A 63-bit seed, distinct for every (run, prompt issue, sample) by splitmix64's mixing of the triple.

    Engines draw by seed and place in the answer: a continuation begins with draws that nothing before it had.
    """
    mask = (1 << 64) - 1
    z = 0
    for part in (run_seed, group_id, member):
        z = (z + part * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z >> 1


class RolloutWorker:
    """One rollout replica: the engine and its way into the dock.

    `partial_rounds`: see `workflow/partial.py`. `group_size`: rows of a whole group, where calls may get parts of one.
    `stream_out_s`: so often the tokens of running answers go into the dock, from where others continue them if this
    process dies. `conversation`: an environment answers the model inside its rows; what is interrupted starts again.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        dock: DockClient,
        sampling: SamplingSpec,
        *,
        name: str,
        seed: int,
        commit_groups: int,
        timeout_s: float,
        tracer: Tracer,
        partial_rounds: int | None = None,
        group_size: int | None = None,
        stream_out_s: float | None = None,
        conversation: Conversation | None = None,
        masked: bool = False,
    ) -> None:
        self.engine, self.dock, self.sampling, self.name = engine, dock, sampling, name
        self.seed, self.commit_groups, self.timeout_s = seed, commit_groups, timeout_s
        self.partial_rounds, self.group_size, self.stream_out_s = partial_rounds, group_size, stream_out_s
        self.tracer, self.conversation, self.masked = tracer, conversation, masked
        self.completing = Completing(engine, name)
        self.mirror: tuple[RelayMirror, MirrorRoute] | None = None
        self._calls: dict[int, set[str]] = {}  # running `generate` calls -> their answers that have not ended
        self._stopped: set[int] = set()  # of these, whose answers shall end now
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._rested = False

    def generate(self, claim_id: int, batch: RowBatch) -> RolloutReport:
        """One round of all rows, admitted to the engine as one batch; an answer that was begun goes on.

        Complete answers are committed and done as their groups end, `commit_groups` at a time, so that scoring starts
        early. Answers that a budget or `stop` has ended keep what they have in the dock, and their rows are released.
        """
        began = time.perf_counter()
        with self._call(batch) as call:
            requests = self._requests(batch)
            resumed = {r.request_id: resumed_tokens(r) for r in requests}
            tray = Tray(batch.rows, batch.group_ids, self.group_size, self.commit_groups)
            kept = {name for name, count in resumed.items() if count}  # of which the dock has a part
            stream = self._stream(claim_id, tray, kept)
            unfinished: list[Completion] = []
            served: set[tuple[int, str]] = set()
            samples = tokens = 0
            tally = None if self.conversation is None else Tally()
            version = self.engine.version
            with (
                self.tracer.span("rollout/generate", lane=self.name, version=version, rows=len(batch)),
                contextlib.closing(self._answers(call, requests, tally, stream)) as answers,
            ):
                for answer in answers:
                    complete = self._is_complete(answer)
                    fresh = answer.sampled - resumed[answer.request_id]
                    samples, tokens = samples + complete, tokens + fresh
                    if fresh:
                        served.add((answer.spans[-1].version, answer.fingerprint))
                    if not complete:
                        unfinished.append(answer)
                    self._commit(claim_id, tray.ended(answer, complete), kept)
                self._commit(claim_id, tray.rest(), kept)
                self._keep(claim_id, unfinished, resumed)
        rows = tuple(int(a.request_id) for a in unfinished)
        return RolloutReport(samples, tokens, time.perf_counter() - began, tuple(sorted(served)), rows, tally)

    def stop(self) -> int:
        """End the answers of all `generate` calls that have begun, with what they have; returns their number.

        When this returns, the dock has their tokens and their rows are released.
        """
        with self._changed:
            calls = list(self._calls)
            self._stopped.update(calls)
            running = [i for ids in self._calls.values() for i in ids]
        if running:
            self.engine.abort(running)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._stopped.intersection(calls), self.timeout_s):
                raise DeadlineExceeded(
                    f"{self.name}: stopped answers are not in the dock after {self.timeout_s} s (rollout.timeout_s)"
                )
        return len(running)

    def running(self) -> int:
        """Answers that have not ended."""
        with self._changed:
            return sum(map(len, self._calls.values()))

    @contextlib.contextmanager
    def _call(self, batch: RowBatch) -> Iterator[int]:
        """From here on `stop` and `running` know of the rows."""
        with self._changed:
            number = next(self._numbers)
            self._calls[number] = set(map(str, batch.rows.tolist()))
        try:
            yield number
        finally:
            with self._changed:
                del self._calls[number]
                self._stopped.discard(number)
                self._changed.notify_all()

    def _requests(self, batch: RowBatch) -> list[GenRequest]:
        columns = self.dock.read(batch.rows, ["prompt_ids", *PARTIAL_COLUMNS])
        seeds = [sample_seed(self.seed, int(g), int(m)) for g, m in zip(batch.group_ids, batch.members)]
        return [
            request_of(int(row), self.sampling, seeds[i], columns, i, self.partial_rounds)
            for i, row in enumerate(batch.rows)
        ]

    def _answers(
        self, call: int, requests: list[GenRequest], tally: Tally | None, stream: Stream | None
    ) -> Generator[Completion]:
        """What the engine gives; a stop that came before it had the requests ends them at once."""
        if self.conversation is None or tally is None:
            answers = self.engine.generate(requests, timeout_s=self.timeout_s, stream=stream)
            if self._is_stopped(call):
                self.engine.abort([r.request_id for r in requests])
        else:
            answers = self.conversation.answers(
                self.engine,
                requests,
                self._asked(requests),
                timeout_s=self.timeout_s,
                stopped=lambda: self._is_stopped(call),
                tally=tally,
            )
        try:
            for answer in answers:
                with self._changed:
                    self._calls[call].discard(answer.request_id)
                yield answer
        finally:
            if isinstance(answers, Generator):
                answers.close()

    def _is_stopped(self, call: int) -> bool:
        with self._changed:
            return call in self._stopped

    def _asked(self, requests: Sequence[GenRequest]) -> list[tuple[str, dict[str, Any]]]:
        """Truth and fields of each row, for the environment."""
        columns = self.dock.read(np.array([int(r.request_id) for r in requests], np.int64), ["truth", "fields"])
        truths, fields = ([bytes(t).decode("utf-8") for t in columns[name]] for name in ("truth", "fields"))
        return [(truth, json.loads(text)) for truth, text in zip(truths, fields)]

    def _is_complete(self, answer: Completion) -> bool:
        """Whether the answer is a whole one. Raises EngineError for what must not be trained, nor continued."""
        broken = answer.finish_reason == "abort" and self.engine.state == "DIRTY"
        if broken or answer.finish_reason == "error":
            raise EngineError(
                f"{self.name}: an answer ended with {answer.finish_reason!r} after {len(answer.token_ids)} tokens "
                f"(engine {self.engine.state}, version {self.engine.version}); DIRTY: loading the next version failed"
            )
        if self.conversation is not None:
            return answer.finish_reason in ("stop", "length")  # a reply that does not fit ends one before its budget
        return answer.finish_reason == "stop" or len(answer.token_ids) >= self.sampling.max_tokens

    def _stream(self, claim_id: int, tray: Tray, kept: set[str]) -> Stream | None:
        """Puts what running answers have, and complete ones that wait for the rest of their group, into the dock. Of
        those the last token is left out: whoever continues them ends them."""
        if self.stream_out_s is None or self.conversation is not None:
            return None
        waiting: dict[str, int] = {}  # tokens of them that the dock has

        def take(running: list[Completion]) -> None:
            ended = [shortened(a) for a in tray.waiting() if len(a.token_ids) - 1 > waiting.get(a.request_id, 0)]
            parts = [*running, *ended]
            if not parts:
                return
            try:
                self.dock.write(
                    handles(parts), part_values(parts), claim_id=claim_id, versions=versions_of(parts), timeout_s=0.0
                )
            except DeadlineExceeded:  # no room now: complete answers come first
                return
            kept.update(a.request_id for a in parts)
            waiting.update((a.request_id, len(a.token_ids)) for a in ended)

        return Stream(self.stream_out_s, take)

    def _commit(self, claim_id: int, answers: Sequence[Completion], kept: set[str]) -> None:
        """Complete answers into the dock: their rows are done. What was `kept` of one goes in that call."""
        for continued in (False, True):
            chosen = [a for a in answers if (a.request_id in kept) == continued]
            if chosen:
                self.dock.write(
                    handles(chosen),
                    whole_values(chosen, continued, self.masked),
                    claim_id=claim_id,
                    versions=versions_of(chosen),
                    done=True,
                )

    def _keep(self, claim_id: int, answers: Sequence[Completion], resumed: dict[str, int]) -> None:
        """What unfinished answers have goes into the dock, and their rows back to whoever claims them."""
        kept = answers if self.conversation is None else []
        grown = [a for a in kept if len(a.token_ids) > resumed[a.request_id]]
        if grown:
            self.dock.write(handles(grown), part_values(grown), claim_id=claim_id, versions=versions_of(grown))
        if answers:
            self.dock.release(claim_id, handles(answers))

    def rest(self) -> None:
        """The engine leaves its device, and its weights are gone: the next load brings it back to serve."""
        self.stop()
        with self.tracer.span("device/rest", lane=self.name):
            if self.engine.state == "RUNNING":
                self.engine.pause("abort")
            self.engine.sleep(2)
        self._rested = True

    def rouse(self) -> None:
        """The engine has its device again, and waits for a load."""
        with self.tracer.span("device/rouse", lane=self.name):
            self.engine.wake()

    def use_mirror(self, route: MirrorRoute) -> None:
        """This replica fetches versions for all replicas of its node."""
        self.mirror = RelayMirror(route.path, route.secret, route.keep), route

    def fetch(self, manifest: WeightManifest) -> tuple[WeightManifest, PullReport]:
        """Bring a version to this node, beside anything else that the replica does: (local manifest, what it took)."""
        if self.mirror is None:
            raise WeightSyncError(f"{self.name} has no mirror to fetch weight version {manifest.version} with")
        mirror, route = self.mirror
        with self.tracer.span("rollout/fetch_weights", lane=f"{self.name} fetches", version=manifest.version):
            local = mirror.pull(manifest, route.sources, route.timeout_s, delta=route.delta)
        return local, mirror.report

    def load(self, manifest: WeightManifest) -> UpdateReport:
        with self.tracer.span("rollout/load_weights", lane=self.name, version=manifest.version):
            report = self.engine.update(manifest)
        if self._rested:
            self.engine.resume()
            self._rested = False
        return report

    def answer(
        self, questions: Sequence[Question], temperature: float | None = None, alone: bool = False
    ) -> list[Completion]:
        """Whole answers outside the dock, in order, beside anything else that the replica does: evaluation and probes.

        `temperature` None: as answers that are trained. `alone`: no environment answers the model.
        """
        spec = self.sampling
        if temperature is not None:
            spec = SamplingSpec(spec.max_tokens, temperature=temperature, stop_token_ids=spec.stop_token_ids)
        requests = [
            GenRequest(f"x{q.key[0]}.{q.key[1]}", q.prompt_ids, spec, sample_seed(self.seed, *q.key)) for q in questions
        ]
        lane, version = f"{self.name} evaluates", self.engine.version
        with self.tracer.span("rollout/evaluate", lane=lane, version=version, rows=len(requests)):
            found = {a.request_id: a for a in self._outside(requests, [] if alone else questions)}
        broken = [a.finish_reason for a in found.values() if a.finish_reason not in ("stop", "length")]
        if broken:
            raise EngineError(
                f"{self.name}: {len(broken)} of {len(found)} answers outside the dock ended with {broken[0]!r} "
                f"(engine {self.engine.state}, version {self.engine.version})"
            )
        return [found[r.request_id] for r in requests]

    def _outside(self, requests: list[GenRequest], asked: Sequence[Question]) -> Iterator[Completion]:
        if self.conversation is None or not asked:
            return self.engine.generate(requests, timeout_s=self.timeout_s)
        rows = [(q.truth, json.loads(q.fields)) for q in asked]
        return self.conversation.answers(
            self.engine, requests, rows, timeout_s=self.timeout_s, stopped=lambda: False, tally=Tally()
        )

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[int, list[np.ndarray]]:
        """(served version, log-probabilities at temperature 1) of given answers."""
        with self.tracer.span("rollout/probe", lane=self.name, version=self.engine.version):
            return self.engine.version, self.engine.score(sequences)

    def close(self) -> None:
        if self.mirror is not None:
            self.mirror[0].close()
        self.engine.close()
        if self.conversation is not None:
            self.conversation.close()
        self.dock.close()
        self.tracer.close()
