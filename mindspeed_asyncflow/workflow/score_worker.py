"""What runs beside the scorers and the reference policy: scores to rewards and advantages, and log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.algorithms.advantages import group_advantages
from mindspeed_asyncflow.config.schema import AlgorithmConfig
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.engines.base import RolloutEngine
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.rewards.pool import ScorerPool
from mindspeed_asyncflow.workflow.workers import RowBatch


@dataclass(frozen=True, slots=True)
class ScoreReport:
    unscored: dict[int, str]  # row -> why it has no score
    busy_s: float
    flat: tuple[int, ...] = ()  # groups that were dropped because all their rewards are equal


def flat_groups(rewards: np.ndarray, group_ids: np.ndarray, kept: np.ndarray) -> tuple[int, ...]:
    """Groups whose `kept` members all have the same reward: they teach nothing (DAPO, arXiv 2503.14476)."""
    found = np.unique(group_ids[kept]).tolist()
    return tuple(g for g in found if np.ptp(rewards[kept & (group_ids == g)]) == 0)


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
        """Write `reward` and `advantage`; rows without a score are dropped and named, and, where the algorithm samples
        dynamically, groups without a difference between their rewards as well."""
        began = time.perf_counter()
        with self.tracer.span("reward/score", lane=self.name, rows=len(batch)):
            columns = self.dock.read(batch.rows, ["response_ids", "truth", "finish"])
            texts = self.decode(columns["response_ids"])
            truths = [bytes(t).decode("utf-8") for t in columns["truth"]]
            scores = self.pool.score(texts, truths, [code == 0 for code in columns["finish"]])
            rewards = np.array([np.nan if s.value is None else s.value for s in scores])
            advantages = group_advantages(rewards, batch.group_ids, self.algorithm)
            kept = advantages.kept
            flat = flat_groups(rewards, batch.group_ids, kept) if self.algorithm.dynamic_sampling else ()
            flat_rows = kept & np.isin(batch.group_ids, flat)
            good = kept & ~flat_rows
            if good.any():
                self.dock.write(
                    batch.rows[good],
                    {
                        "reward": rewards[good].astype(np.float32),
                        "advantage": advantages.values[good].astype(np.float32),
                    },
                    claim_id=claim_id,
                )
            for rows, reason in ((batch.rows[~kept], "unscored"), (batch.rows[flat_rows], "zero_variance")):
                if len(rows):
                    self.dock.drop(rows, reason=reason)
            self.dock.done(claim_id)
        unscored = {
            int(r): s.error or "too few scored answers in its group"
            for r, s, k in zip(batch.rows, scores, kept)
            if not k
        }
        return ScoreReport(unscored, time.perf_counter() - began, flat)

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
