"""What runs beside a critic's engine in every critic rank: values and advantages of answers, and the critic's step.

`value` makes, of rewards, what the trainer trains on (algorithms/gae.py):
    reward of an answer on its last token - kl_coef x KL of each token (`algorithm.kl_in` reward)
    -> advantages and returns, with the values that the critic has at that moment
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.algorithms.gae import gae, token_rewards
from mindspeed_asyncflow.algorithms.kl import kl_values
from mindspeed_asyncflow.config.schema import AlgorithmConfig
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.engines.base import CriticEngine
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.records import TrainSample
from mindspeed_asyncflow.workflow.batcher import pack
from mindspeed_asyncflow.workflow.state_keeping import KeepsState
from mindspeed_asyncflow.workflow.train_worker import ChunkReport, ChunkRules, FinishReport, trained_tokens

Plan = list[list[list[int]]]  # [replica][micro-batch][row]
Groups = Mapping[int, tuple[int, int]]  # row -> (group id, member)


class CriticWorker(KeepsState):
    """One critic rank. All ranks get the same calls in the same order, but what `KeepsState` says."""

    part = lane = "critic"

    def __init__(
        self,
        engine: CriticEngine,
        dock: DockClient,
        algorithm: AlgorithmConfig,
        *,
        name: str,
        replica: int,
        leads: bool,
        tracer: Tracer,
        conversations: bool = False,
    ) -> None:
        """`leads`: this rank writes what its data-parallel replica has found; `conversations`: an environment has
        written some tokens of the answers, which have no value."""
        self.engine, self.dock, self.algorithm, self.name = engine, dock, algorithm, name
        self.replica, self.leads, self.tracer = replica, leads, tracer
        self.masks = ["response_mask"] if conversations else []
        self.kl = ["rollout_logprobs", "ref_logprobs"] if algorithm.kl_reward else []

    def value(self, claim_id: int, plan: Plan, groups: Groups) -> float:
        """Write `values`, `token_advantages` and `returns` of this replica's rows of `plan`; seconds it took.

        The claim is done when all replicas have written: who gave it out says so.
        """
        began = time.perf_counter()
        with self.tracer.span("critic/values", lane=self.name):
            mine = plan[self.replica]
            rows = np.array([r for batch in mine for r in batch], dtype=np.int64)
            columns = self._columns(rows, ["prompt_ids", "response_ids", "reward", *self.masks, *self.kl])
            masks = [None] * len(rows) if not self.masks else [np.asarray(m) for m in columns["response_mask"]]
            samples = self._samples(rows, groups, columns, masks)
            batches = [pack([samples[r] for r in batch]) for batch in mine]
            found = self.engine.values(batches)
            values = [v[b.loss_mask > 0] for v, b in zip(found, batches)]
            if self.leads and len(rows):
                of_tokens = np.concatenate(values).astype(np.float64)
                self.dock.write(rows, self._advantages(columns, masks, of_tokens), claim_id=claim_id)
        return time.perf_counter() - began

    def _advantages(
        self, columns: Mapping[str, Any], masks: Sequence[np.ndarray | None], of_tokens: np.ndarray
    ) -> dict[str, list[np.ndarray]]:
        """Columns of the dock, float32 [L] of each row. `of_tokens`: values of all sampled tokens, row after row."""
        a = self.algorithm
        out: dict[str, list[np.ndarray]] = {"values": [], "token_advantages": [], "returns": []}
        first = 0
        for i, reward in enumerate(np.asarray(columns["reward"], np.float64)):
            length, written = len(columns["response_ids"][i]), masks[i]
            mask = np.ones(length, np.uint8) if written is None else written
            values = np.zeros(length)
            sampled = int((mask > 0).sum())
            values[mask > 0] = of_tokens[first : first + sampled]
            first += sampled
            kl = None
            if self.kl:
                kl = kl_values(a.kl_type, *(np.asarray(columns[name][i]) for name in self.kl))
            rewards = token_rewards(float(reward), kl, a.kl_coef, mask)
            advantages, returns = gae(rewards, values, mask, a.gamma, a.gae_lambda)
            for name, array in zip(out, (values, advantages, returns)):
                out[name].append(array.astype(np.float32))
        return out

    def train(
        self, plan: Plan, versions: Mapping[int, tuple[int, int]], groups: Groups, rules: ChunkRules
    ) -> ChunkReport:
        """Accumulate gradients of the value loss over the tokens that the trainer trains of this replica's rows.

        The arguments are those of `TrainWorker.train`; `rules` say which tokens are too old.
        """
        began = time.perf_counter()
        with self.tracer.span("critic/forward_backward", lane=self.name):
            mine = plan[self.replica]
            rows = np.array([r for batch in mine for r in batch], dtype=np.int64)
            spans = ["response_spans"] if rules.oldest_allowed is not None else []
            wanted = ["prompt_ids", "response_ids", "finish", "values", "returns", *self.masks, *spans]
            columns = self._columns(rows, wanted)
            masks, _ = trained_tokens(columns, len(rows), rules, self.algorithm.mask_truncated)
            samples = self._samples(rows, groups, columns, masks)
            sums = self.engine.forward_backward([pack([samples[r] for r in batch]) for batch in mine])
        return ChunkReport(sums, time.perf_counter() - began)

    def _columns(self, rows: np.ndarray, names: Sequence[str]) -> Mapping[str, Any]:
        """Of the dock; a replica without rows reads nothing."""
        return self.dock.read(rows, names) if len(rows) else {name: [] for name in names}

    @staticmethod
    def _samples(
        rows: np.ndarray, groups: Groups, columns: Mapping[str, Any], masks: Sequence[np.ndarray | None]
    ) -> dict[int, TrainSample]:
        """What the critic reads of each row, by row. The policy's fields are empty."""
        known = [columns.get(name, [None] * len(rows)) for name in ("values", "returns")]
        return {
            row: TrainSample(
                row=row,
                group_id=groups[row][0],
                member=groups[row][1],
                prompt_ids=columns["prompt_ids"][i],
                response_ids=columns["response_ids"][i],
                rollout_logprobs=np.zeros(len(columns["response_ids"][i]), np.float32),
                advantage=0.0,
                version_min=0,
                version_max=0,
                loss_mask=masks[i],
                values=known[0][i],
                returns=known[1][i],
            )
            for i, row in enumerate(rows.tolist())
        }

    def finish(self, version: int, tokens: int) -> FinishReport:
        """One optimizer step over everything accumulated. `tokens`: those that the value loss counted over the whole
        step; without any, nothing changes."""
        began = time.perf_counter()
        with self.tracer.span("critic/optimizer", lane=self.name, version=version):
            optim = self.engine.optim_step(float(tokens))
        return FinishReport(optim, time.perf_counter() - began, 0.0)

    def _engine(self) -> CriticEngine:
        return self.engine

    def close(self) -> None:
        self.engine.close()
        self.dock.close()
        self.tracer.close()
