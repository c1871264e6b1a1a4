"""What runs beside the engines: read rows from the dock, call the engine or scorer, write columns back.

Workers know neither Ray nor the loops. They get row handles and answer with small reports; tensors stay between the
worker and the warehouse of its node. Every method may be called from another process, so arguments and results are
plain values and records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_asyncflow.algorithms.advantages import group_advantages
from mindspeed_asyncflow.config.schema import AlgorithmConfig
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.engines.base import RolloutEngine
from mindspeed_asyncflow.errors import EngineError, WeightSyncError
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.records import Completion, GenRequest, SamplingSpec, UpdateReport, WeightManifest
from mindspeed_asyncflow.reshard.relay_mirror import PullReport, RelayMirror
from mindspeed_asyncflow.rewards.pool import ScorerPool

FINISH_CODES = {"stop": 0, "length": 1, "abort": 2, "error": 3}


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
    samples: int
    tokens: int
    busy_s: float
    served: tuple[tuple[int, str], ...]  # (version, fingerprint) at the end of each answer, without repetition


@dataclass(frozen=True, slots=True)
class MirrorRoute:
    """Where a node's mirror keeps versions (a path under /dev/shm), and from which relay servers it fetches them."""

    path: str
    sources: tuple[str, ...]  # host:port of the server on every node with trainer ranks
    secret: bytes = field(repr=False)
    keep: int
    timeout_s: float  # a fetch may be silent for so long
    delta: bool


@dataclass(frozen=True, slots=True)
class ScoreReport:
    unscored: dict[int, str]  # row -> why it has no score
    busy_s: float


def sample_seed(run_seed: int, group_id: int, member: int) -> int:
    """A 63-bit seed, distinct for every (run, prompt issue, sample) by splitmix64's mixing of the triple."""
    mask = (1 << 64) - 1
    z = 0
    for part in (run_seed, group_id, member):
        z = (z + part * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z >> 1


class RolloutWorker:
    """One rollout replica: the engine and its way into the dock."""

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
    ) -> None:
        self.engine, self.dock, self.sampling, self.name = engine, dock, sampling, name
        self.seed, self.commit_groups, self.timeout_s = seed, commit_groups, timeout_s
        self.tracer = tracer
        self.mirror: tuple[RelayMirror, MirrorRoute] | None = None

    def generate(self, claim_id: int, batch: RowBatch) -> RolloutReport:
        """Answer all rows, admitted to the engine as one batch.

        Whole groups are committed as they complete, `commit_groups` at a time, so that scoring starts early.
        """
        began = time.perf_counter()
        prompts = self.dock.read(batch.rows, ["prompt_ids"])["prompt_ids"]
        requests = [
            GenRequest(
                request_id=str(int(row)),
                prompt_ids=np.array(prompts[i]),
                sampling=self.sampling,
                seed=sample_seed(self.seed, int(batch.group_ids[i]), int(batch.members[i])),
            )
            for i, row in enumerate(batch.rows)
        ]
        group_of = dict(zip(batch.rows.tolist(), batch.group_ids.tolist()))
        missing = {g: 0 for g in group_of.values()}
        for g in group_of.values():
            missing[g] += 1
        waiting: dict[int, list[Completion]] = {g: [] for g in missing}
        ready: list[Completion] = []
        served: set[tuple[int, str]] = set()
        ready_groups = tokens = 0
        with self.tracer.span("rollout/generate", lane=self.name, version=self.engine.version, rows=len(batch)):
            for answer in self.engine.generate(requests, timeout_s=self.timeout_s):
                self._require_whole(answer)
                group = group_of[int(answer.request_id)]
                tokens += len(answer.token_ids)
                if answer.spans:
                    served.add((answer.spans[-1].version, answer.fingerprint))
                waiting[group].append(answer)
                if len(waiting[group]) == missing[group]:
                    ready += waiting.pop(group)
                    ready_groups += 1
                if ready_groups >= self.commit_groups:
                    self._commit(claim_id, ready)
                    ready, ready_groups = [], 0
            if ready:
                self._commit(claim_id, ready)
        self.dock.done(claim_id)
        return RolloutReport(len(batch), tokens, time.perf_counter() - began, tuple(sorted(served)))

    def _require_whole(self, answer: Completion) -> None:
        """A part of an answer must not be trained as a whole one."""
        if answer.finish_reason in ("abort", "error"):
            raise EngineError(
                f"{self.name}: an answer ended with {answer.finish_reason!r} after {len(answer.token_ids)} tokens "
                f"(engine {self.engine.state}, version {self.engine.version}); DIRTY: loading the next version failed"
            )

    def _commit(self, claim_id: int, answers: Sequence[Completion]) -> None:
        self.dock.write(
            np.array([int(a.request_id) for a in answers], dtype=np.int64),
            {
                "response_ids": [a.token_ids for a in answers],
                "rollout_logprobs": [a.logprobs for a in answers],
                "finish": np.array([FINISH_CODES[a.finish_reason] for a in answers], dtype=np.uint8),
            },
            claim_id=claim_id,
            versions=(
                np.array([a.version_min for a in answers], dtype=np.int32),
                np.array([a.version_max for a in answers], dtype=np.int32),
            ),
        )

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
            return self.engine.update(manifest)

    def answer(self, prompts: Sequence[np.ndarray], greedy: bool) -> list[tuple[np.ndarray, str]]:
        """(token ids, finish reason) for prompts outside the dock, in order: evaluation and probes."""
        spec = self.sampling
        if greedy:
            spec = SamplingSpec(spec.max_tokens, temperature=0.0, stop_token_ids=spec.stop_token_ids)
        requests = [GenRequest(f"x{i}", p, spec, sample_seed(self.seed, -1, i)) for i, p in enumerate(prompts)]
        with self.tracer.span("rollout/evaluate", lane=self.name, version=self.engine.version, rows=len(prompts)):
            answers = {a.request_id: a for a in self.engine.generate(requests, timeout_s=self.timeout_s)}
        return [(answers[r.request_id].token_ids, answers[r.request_id].finish_reason) for r in requests]

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[int, list[np.ndarray]]:
        """(served version, log-probabilities at temperature 1) of given answers."""
        with self.tracer.span("rollout/probe", lane=self.name, version=self.engine.version):
            return self.engine.version, self.engine.score(sequences)

    def close(self) -> None:
        if self.mirror is not None:
            self.mirror[0].close()
        self.engine.close()
        self.dock.close()
        self.tracer.close()


class ScoreWorker:
    """Rewards and group-relative advantages of whole prompt groups."""

    def __init__(
        self,
        pool: ScorerPool,
        dock: DockClient,
        decode: Callable[[Sequence[np.ndarray]], list[str]],
        algorithm: AlgorithmConfig,
        *,
        name: str,
        tracer: Tracer,
    ) -> None:
        self.pool, self.dock, self.decode, self.algorithm, self.name = pool, dock, decode, algorithm, name
        self.tracer = tracer

    def score(self, claim_id: int, batch: RowBatch) -> ScoreReport:
        """Write `reward` and `advantage`; rows without a score are dropped and named."""
        began = time.perf_counter()
        with self.tracer.span("reward/score", lane=self.name, rows=len(batch)):
            columns = self.dock.read(batch.rows, ["response_ids", "truth", "finish"])
            texts = self.decode(columns["response_ids"])
            truths = [bytes(t).decode("utf-8") for t in columns["truth"]]
            scores = self.pool.score(texts, truths, [code == 0 for code in columns["finish"]])
            rewards = np.array([np.nan if s.value is None else s.value for s in scores])
            advantages = group_advantages(rewards, batch.group_ids, self.algorithm)
            kept = advantages.kept
            if kept.any():
                self.dock.write(
                    batch.rows[kept],
                    {
                        "reward": rewards[kept].astype(np.float32),
                        "advantage": advantages.values[kept].astype(np.float32),
                    },
                    claim_id=claim_id,
                )
            if not kept.all():
                self.dock.drop(batch.rows[~kept], reason="unscored")
            self.dock.done(claim_id)
        unscored = {
            int(r): s.error or "too few scored answers in its group"
            for r, s, k in zip(batch.rows, scores, kept)
            if not k
        }
        return ScoreReport(unscored, time.perf_counter() - began)

    def score_texts(self, answers: Sequence[np.ndarray], truths: Sequence[str], finished: Sequence[bool]) -> list:
        """Scores (None: no score) of answers outside the dock."""
        scores = self.pool.score(self.decode(answers), list(truths), list(finished))
        return [s.value for s in scores]

    def close(self) -> None:
        self.pool.close()
        self.dock.close()
        self.tracer.close()


class ReferenceWorker:
    """Log-probabilities of a frozen copy of the starting policy, for the KL term."""

    def __init__(self, engine: RolloutEngine, dock: DockClient, *, name: str, tracer: Tracer) -> None:
        self.engine, self.dock, self.name, self.tracer = engine, dock, name, tracer

    def logprobs(self, claim_id: int, batch: RowBatch) -> float:
        began = time.perf_counter()
        with self.tracer.span("reference/logprobs", lane=self.name, rows=len(batch)):
            columns = self.dock.read(batch.rows, ["prompt_ids", "response_ids"])
            pairs = [(np.array(p), np.array(r)) for p, r in zip(columns["prompt_ids"], columns["response_ids"])]
            self.dock.write(batch.rows, {"ref_logprobs": self.engine.score(pairs)}, claim_id=claim_id)
            self.dock.done(claim_id)
        return time.perf_counter() - began

    def close(self) -> None:
        self.engine.close()
        self.dock.close()
        self.tracer.close()
