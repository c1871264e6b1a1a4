"""`ReferenceEngine`: a small transformers loop with KV cache, as oracle and where the vLLM wheel does not exist."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.base import EngineCaps
from mindspeed_asyncflow.engines.hf_model import HostModel
from mindspeed_asyncflow.engines.lifecycle import PAUSE_MODES
from mindspeed_asyncflow.engines.sampling import sample
from mindspeed_asyncflow.engines.step_backend import Finished, WantedWeight
from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.errors import EngineError
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.memory import DeviceMemory
from mindspeed_asyncflow.records import GenRequest, WeightManifest
from mindspeed_asyncflow.reshard.fingerprint import fingerprint_of

START_TIMEOUT_S = 120.0
SCORE_BATCH_TOKENS = 16384  # padded tokens of one scoring forward


@dataclass(slots=True, eq=False)
class _Row:
    """One request and the tokens it has so far."""

    request: GenRequest
    stop_ids: frozenset[int]
    resumed: int
    ids: list[int]  # prompt, resumed and sampled tokens
    token_ids: list[int] = field(default_factory=list)  # sampled since admission
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Index in the answer of the token that comes next."""
        return self.resumed + len(self.token_ids)

    def finish_reason(self) -> str:
        if self.token_ids and self.token_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if self.position >= self.request.sampling.max_tokens else ""

    def finished(self, reason: str) -> Finished:
        return Finished(self.request.request_id, self.token_ids, self.logprobs, reason)


class _Cohort:
    """Rows that were admitted together share one left-padded KV cache. Without a cache it prefills again."""

    def __init__(self, rows: list[_Row]) -> None:
        self.rows = rows
        self._cache: Any = None
        self._mask = torch.empty(0)  # int64 [B, T], 1 on real tokens

    def logits(self, model: HostModel) -> torch.Tensor:
        """[B, V] logits of the next token of every row."""
        if self._cache is None:
            ids, self._mask = pad_left([row.ids for row in self.rows])
            self._cache = model.new_cache()
        else:
            ids = torch.tensor([[row.ids[-1]] for row in self.rows])
            self._mask = torch.cat([self._mask, torch.ones(len(self.rows), 1, dtype=torch.long)], dim=1)
        return model.forward(ids, self._mask, cache=self._cache, keep=1)[:, 0]

    def keep(self, model: HostModel, rows: list[_Row]) -> None:
        """Drop the other rows."""
        if len(rows) < len(self.rows):
            kept = set(rows)
            index = torch.tensor([i for i, row in enumerate(self.rows) if row in kept], dtype=torch.long)
            self.rows = [self.rows[i] for i in index.tolist()]
            if self._cache is not None and self.rows:
                self._mask = self._mask[index]
                model.select(self._cache, index)

    def drop_cache(self) -> None:
        self._cache = None


class ReferenceBackend:
    """See `StepBackend`. `rollout.kv_cache_mb` is not enforced: the cache is as large as the running answers."""

    def __init__(
        self,
        model_folder: str,
        rollout: RolloutConfig,
        dtype: str,
        max_model_len: int,
        stop_token_ids: tuple[int, ...],
        score_temperature: float,
        memory: DeviceMemory,
    ) -> None:
        torch.set_num_threads(rollout.threads)
        self._model = HostModel(model_folder, dtype, memory)
        self.token_count = self._model.weights.token_count
        self._max_running = rollout.max_running
        self._max_model_len = max_model_len
        self._stop_token_ids = stop_token_ids
        self._score_temperature = score_temperature
        self._waiting: deque[_Row] = deque()
        self._cohorts: list[_Cohort] = []
        self.caps = EngineCaps(
            name="reference",
            pause_modes=PAUSE_MODES,
            sleep_levels=(1, 2),
            transports=("relay", "in_place"),
            expert_parallel=False,
        )

    def check(self, request: GenRequest) -> None:
        length = len(request.prompt_ids) + request.sampling.max_tokens
        if length > self._max_model_len:
            raise EngineError(
                f"request {request.request_id}: prompt of {len(request.prompt_ids)} plus max_tokens "
                f"{request.sampling.max_tokens} exceeds the model length {self._max_model_len}"
            )
        self._model.weights.check_ids(request.request_id, request.prompt_ids)

    def admit(self, requests: Sequence[GenRequest]) -> None:
        for request in requests:
            resumed = [] if request.resume_ids is None else request.resume_ids.tolist()
            stops = frozenset(request.sampling.stop_token_ids or self._stop_token_ids)
            self._waiting.append(_Row(request, stops, len(resumed), request.prompt_ids.tolist() + resumed))

    def step(self) -> list[Finished]:
        room = self._max_running - sum(len(c.rows) for c in self._cohorts)
        if room > 0 and self._waiting:
            count = min(room, len(self._waiting))
            self._cohorts.append(_Cohort([self._waiting.popleft() for _ in range(count)]))
        finished: list[Finished] = []
        for cohort in self._cohorts:
            finished += self._advance(cohort)
        self._cohorts = [c for c in self._cohorts if c.rows]
        return finished

    def _advance(self, cohort: _Cohort) -> list[Finished]:
        rows = cohort.rows
        tokens, logprobs = sample(
            cohort.logits(self._model),
            [row.request.sampling for row in rows],
            [row.request.seed for row in rows],
            [row.position for row in rows],
        )
        finished, left = [], []
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.ids.append(token)
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            reason = row.finish_reason()
            if reason:
                finished.append(row.finished(reason))
            else:
                left.append(row)
        cohort.keep(self._model, left)
        return finished

    def _rows(self) -> list[_Row]:
        return [row for cohort in self._cohorts for row in cohort.rows] + list(self._waiting)

    def progress(self) -> dict[str, int]:
        return {row.request.request_id: len(row.token_ids) for row in self._rows()}

    def sampled(self, since: Mapping[str, int]) -> list[Finished]:
        rows = [row for row in self._rows() if row.request.request_id in since]
        begun = [(row, since[row.request.request_id]) for row in rows]
        return [Finished(r.request.request_id, r.token_ids[n:], r.logprobs[n:], "running") for r, n in begun]

    def abort(self, request_ids: Sequence[str]) -> list[Finished]:
        wanted = set(request_ids)
        ended = [row for row in self._rows() if row.request.request_id in wanted]
        self._waiting = deque(row for row in self._waiting if row.request.request_id not in wanted)
        for cohort in self._cohorts:
            cohort.keep(self._model, [row for row in cohort.rows if row.request.request_id not in wanted])
        self._cohorts = [c for c in self._cohorts if c.rows]
        return [row.finished("abort") for row in ended]

    def check_manifest(self, manifest: WeightManifest) -> None:
        self._model.weights.check(manifest)

    def load(self, manifest: WeightManifest) -> str:
        return self._model.load(manifest)

    def weights_wanted(self) -> tuple[WantedWeight, ...]:
        return self._model.weights_wanted()

    def generation_buffers(self) -> dict[str, torch.Tensor]:
        return self._model.buffers()

    def buffers_fingerprint(self) -> str:
        return fingerprint_of(self._model.buffers())

    def clear_caches(self) -> None:
        for cohort in self._cohorts:
            cohort.drop_cache()

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        scores: list[np.ndarray] = []
        longest = max((len(p) + len(r) for p, r in sequences), default=1)
        if longest > self._max_model_len:
            raise EngineError(f"a sequence of {longest} tokens exceeds the model length {self._max_model_len}")
        batch = max(1, SCORE_BATCH_TOKENS // longest)
        for start in range(0, len(sequences), batch):
            part = sequences[start : start + batch]
            ids, mask = pad_left([np.concatenate(pair).tolist() for pair in part])
            keep = max(len(response) for _, response in part) + 1
            logits = self._model.forward(ids, mask, keep=keep)[:, :-1].float()  # [B, K, V]
            logprobs = (logits / self._score_temperature).log_softmax(dim=-1)
            picked = logprobs.gather(2, ids[:, -logprobs.shape[1] :, None])[..., 0].numpy()  # [B, K]
            scores += [row[len(row) - len(response) :].copy() for row, (_, response) in zip(picked, part, strict=True)]
        return scores

    def sleep(self, level: int) -> None:
        self._cohorts = []  # the caches go with them
        self._model.sleep(keep_weights=level < 2)

    def wake(self) -> None:
        self._model.wake()

    def residual_bytes(self) -> int:
        return self._model.device_bytes()

    def close(self) -> None:
        self._cohorts, self._waiting = [], deque()
        self._model.close()


def pad_left(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [B, T], mask int64 [B, T] with 1 on real tokens); every row ends at T."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.as_tensor(row, dtype=torch.long)
        mask[i, width - len(row) :] = 1
    return ids, mask


class ReferenceEngine(SteppedEngine):
    """Same constructor as `VLLMEngine`; `seed` is unused because every request brings its own.

    `score_temperature` divides the logits in `score`: the frozen reference of a KL term is compared with a policy at
    the sampling temperature. `max_model_len` counts prompt and answer together. Weights and caches lie in `memory`
    (None: one of its own). Raises `DataError` when the folder cannot be loaded.
    """

    def __init__(
        self,
        model_folder: str,
        rollout: RolloutConfig,
        *,
        dtype: str,
        max_model_len: int,
        seed: int,
        stop_token_ids: tuple[int, ...],
        score_temperature: float = 1.0,
        memory: DeviceMemory | None = None,
    ) -> None:
        books = memory or DeviceMemory(CpuPlatform())
        super().__init__(
            "reference",
            lambda: ReferenceBackend(
                model_folder, rollout, dtype, max_model_len, stop_token_ids, score_temperature, books
            ),
            start_timeout_s=START_TIMEOUT_S,
            command_timeout_s=rollout.timeout_s,
        )
