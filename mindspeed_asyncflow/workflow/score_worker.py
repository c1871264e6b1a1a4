"""What runs beside the scorers and the reference policy: scores to rewards and advantages, and log-probabilities.

scores of the task's or the user's scorers
  + punishment of answers near the length limit (`reward.overlong_buffer`)
  - kl_coef x KL to the reference, summed over the answer (`algorithm.kl_in` reward)
  = rewards, which become advantages (algorithms/advantages.py); a critic makes its own of them
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mindspeed_asyncflow.algorithms.advantages import group_advantages
from mindspeed_asyncflow.algorithms.gae import returns_to_go, token_rewards
from mindspeed_asyncflow.algorithms.kl import kl_values
from mindspeed_asyncflow.algorithms.overlong import overlong_penalty
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.engines.base import RolloutEngine
from mindspeed_asyncflow.errors import DockError
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.pool import Score, ScorerPool
from mindspeed_asyncflow.workflow.conversing import turns_of
from mindspeed_asyncflow.workflow.workers import RowBatch

FINISHED = 0  # code of the `finish` column for an answer that the policy ended itself


@dataclass(frozen=True, slots=True)
class ScoreReport:
    unscored: dict[int, str]  # row -> why it has no score
    busy_s: float
    flat: tuple[int, ...] = ()  # groups that are to be dropped because all their scores are equal
    scores: tuple[float, ...] = ()  # of each row, before punishments; NaN: it has none
    parts: dict[str, tuple[float, ...]] = field(default_factory=dict)  # of each scorer of a weighted sum


def flat_groups(scores: np.ndarray, group_ids: np.ndarray, kept: np.ndarray) -> tuple[int, ...]:
    """Groups whose `kept` members all have the same score: they teach nothing (DAPO, arXiv 2503.14476)."""
    found = np.unique(group_ids[kept]).tolist()
    return tuple(g for g in found if np.ptp(scores[kept & (group_ids == g)]) == 0)


class ScoreWorker:
    """Scores, rewards and, without a critic, advantages of whole prompt groups."""

    def __init__(
        self,
        pool: ScorerPool,
        dock: DockClient,
        decode: Callable[[Sequence[np.ndarray]], list[str]],
        config: Config,
        *,
        name: str,
        tracer: Tracer,
    ) -> None:
        self.pool, self.dock, self.decode, self.config, self.name = pool, dock, decode, config, name
        self.tracer = tracer
        a = config.algorithm
        self.critic = a.advantage == "gae"  # it makes advantages, and takes the KL term off the reward token by token
        self.kl = ["rollout_logprobs", "ref_logprobs"] if a.kl_reward and not self.critic else []
        self.masks = ["response_mask"] if config.masked else []

    def score(self, claim_id: int, batch: RowBatch, again: bool = False) -> ScoreReport:
        """Write `score`, `reward` and advantages. Named are rows without a score and, where the algorithm samples
        dynamically, groups without a difference between their scores: nothing is written for them, and the caller drops
        them. `again`: some of these rows may be scored already, by a scorer that died before it said so; that stands.
        """
        if again:
            return self._go_on(claim_id, batch)
        began = time.perf_counter()
        with self.tracer.span("reward/score", lane=self.name, rows=len(batch)):
            columns = self.dock.read(batch.rows, ["response_ids", "truth", "fields", "finish", *self.kl, *self.masks])
            found = self._found(batch, columns)
            scores = np.array([np.nan if s.value is None else s.value for s in found])
            rewards = scores + self._punishments(columns)
            per_token = self._token_rewards(columns, rewards)
            if per_token is not None:
                rewards = np.array([r.sum() for r in per_token])
            advantages = group_advantages(rewards, batch.group_ids, self.config.algorithm)
            kept = advantages.kept
            flat = flat_groups(scores, batch.group_ids, kept) if self.config.algorithm.dynamic_sampling else ()
            flat_rows = kept & np.isin(batch.group_ids, flat)
            good = kept & ~flat_rows
            if good.any():
                values = {"score": scores.astype(np.float32), "reward": rewards.astype(np.float32)}
                written: dict[str, Any] = {name: of_rows[good] for name, of_rows in values.items()}
                of_rows = self._chosen(batch, advantages.values)
                written |= self._advantages(good, of_rows, per_token, columns)
                self.dock.write(batch.rows[good], written, claim_id=claim_id)
        unscored = {
            int(r): s.error or "too few scored answers in its group"
            for r, s, k in zip(batch.rows, found, kept)
            if not k
        }
        names = {name: None for s in found for name in s.parts}
        return ScoreReport(
            unscored,
            time.perf_counter() - began,
            flat,
            tuple(scores.tolist()),
            {n: tuple(s.parts[n] for s in found if n in s.parts) for n in names},
        )

    def _found(self, batch: RowBatch, columns: Mapping[str, Any]) -> list[Score]:
        return self.pool.score(self._answers(columns))

    def _chosen(self, batch: RowBatch, advantages: np.ndarray) -> np.ndarray:
        """[n]: what is written of the `advantages` that the scores come to."""
        return advantages

    def _go_on(self, claim_id: int, batch: RowBatch) -> ScoreReport:
        """Scores the groups of which nothing is written; all that a group gets is written at once."""
        scores = np.array([self._score_of(row) for row in batch.rows])
        there = np.isin(batch.group_ids, batch.group_ids[~np.isnan(scores)])
        unscored = dict.fromkeys(batch.rows[there & np.isnan(scores)].tolist(), "its scorer died before it said why")
        report = ScoreReport({}, 0.0)
        if not there.all():
            report = self.score(claim_id, batch.select(~there))
            scores[~there] = report.scores
        return replace(report, unscored=report.unscored | unscored, scores=tuple(scores.tolist()))

    def _score_of(self, row: int) -> float:
        """NaN where it has none."""
        try:
            return float(self.dock.read(np.array([row], np.int64), ["score"])["score"][0])
        except DockError:
            return math.nan

    def _answers(self, columns: Mapping[str, Any]) -> list[Answer]:
        truths, fields = ([bytes(t).decode("utf-8") for t in columns[name]] for name in ("truth", "fields"))
        finished = [bool(code == FINISHED) for code in columns["finish"]]
        masks = columns["response_mask"] if self.masks else None
        return self._told(columns["response_ids"], masks, truths, finished, fields)

    def _told(
        self,
        ids: Sequence[np.ndarray],
        masks: Sequence[np.ndarray] | None,
        truths: Sequence[str],
        finished: Sequence[bool],
        fields: Sequence[str],
    ) -> list[Answer]:
        """What a scorer is told of answers: of conversations (`masks`) what the model said last, all turns a field."""
        talks = []
        if masks is not None:
            talks = [turns_of(np.asarray(i), np.asarray(mask), self.decode) for i, mask in zip(ids, masks)]
        texts = [turns[-1].text for turns in talks] if talks else self.decode(ids)
        tokens = [len(i) for i in ids]
        answers = [answer_of(*each) for each in zip(texts, truths, finished, fields, tokens)]
        for answer, turns in zip(answers, talks):
            answer.fields["turns"] = [turn._asdict() for turn in turns]
        return answers

    def _punishments(self, columns: Mapping[str, Any]) -> np.ndarray:
        """[n], at most 0."""
        r, lengths = self.config.reward, np.array([len(ids) for ids in columns["response_ids"]])
        if r.overlong_buffer is None:
            return np.zeros(len(lengths))
        limit = self.config.rollout.max_new_tokens
        return overlong_penalty(lengths, limit, r.overlong_buffer, r.overlong_factor, r.overlong_beyond)

    def _token_rewards(self, columns: Mapping[str, Any], rewards: np.ndarray) -> list[np.ndarray] | None:
        """[L] of each answer; None where all of the reward is that of the answer as a whole."""
        a = self.config.algorithm
        if self.critic or not (self.kl or a.token_level):
            return None
        kls: list[np.ndarray | None] = [None] * len(rewards)
        if self.kl:
            pairs = zip(columns["rollout_logprobs"], columns["ref_logprobs"])
            kls = [kl_values(a.kl_type, np.asarray(mu), np.asarray(ref)) for mu, ref in pairs]
        each = zip(rewards, kls, self._sampled(columns))
        return [token_rewards(float(r), kl, a.kl_coef, mask) for r, kl, mask in each]

    def _sampled(self, columns: Mapping[str, Any]) -> list[np.ndarray]:
        """uint8 [L] of each answer: 0 where an environment wrote the token."""
        if self.masks:
            return [np.asarray(mask) for mask in columns["response_mask"]]
        return [np.ones(len(ids), np.uint8) for ids in columns["response_ids"]]

    def _advantages(
        self, good: np.ndarray, values: np.ndarray, per_token: list[np.ndarray] | None, columns: Mapping[str, Any]
    ) -> dict[str, Any]:
        a = self.config.algorithm
        if self.critic:
            return {}
        if not a.token_level:
            return {"advantage": values[good].astype(np.float32)}
        assert per_token is not None
        masks = self._sampled(columns)
        returns = [returns_to_go(per_token[i], a.gamma, masks[i]) for i in np.flatnonzero(good)]
        return {"token_advantages": [r.astype(np.float32) for r in returns]}

    def score_answers(
        self,
        answers: Sequence[np.ndarray],
        masks: Sequence[np.ndarray] | None,
        truths: Sequence[str],
        finished: Sequence[bool],
        fields: Sequence[str],
    ) -> tuple[list[Score], list[str]]:
        """Scores and texts of answers outside the dock, given as token ids [L]; `masks` [L]: of conversations."""
        told = self._told(answers, masks, truths, finished, fields)
        return self.pool.score(told), [answer.text for answer in told]

    def close(self) -> None:
        self.pool.close()
        self.dock.close()
        self.tracer.close()


def answer_of(text: str, truth: str, finished: bool, fields: str, tokens: int) -> Answer:
    """`fields` is JSON text, as in the dock."""
    known = json.loads(fields)
    return Answer(text, truth, finished, known.get("prompt", ""), known, tokens)


class ReferenceWorker:
    """Log-probabilities of a frozen copy of the starting policy, for the KL term."""

    def __init__(self, engine: RolloutEngine, dock: DockClient, *, name: str, tracer: Tracer) -> None:
        self.engine, self.dock, self.name, self.tracer = engine, dock, name, tracer

    def logprobs(self, claim_id: int, batch: RowBatch) -> float:
        began = time.perf_counter()
        with self.tracer.span("reference/logprobs", lane=self.name, rows=len(batch)):
            columns = self.dock.read(batch.rows, ["prompt_ids", "response_ids"])
            pairs = [(np.array(p), np.array(r)) for p, r in zip(columns["prompt_ids"], columns["response_ids"])]
            self.dock.write(batch.rows, {"ref_logprobs": self.engine.score(pairs)}, claim_id=claim_id, done=True)
        return time.perf_counter() - began

    def close(self) -> None:
        self.engine.close()
        self.dock.close()
        self.tracer.close()
