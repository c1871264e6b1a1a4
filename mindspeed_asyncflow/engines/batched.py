"""A rollout engine out of a model that answers a whole batch at a time: three methods, and the rest is here.

Nothing is interrupted inside a batch: an update, a pause or an abort waits until its answers are complete, and ends or
holds back those that have not begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mindspeed_asyncflow.config.feasibility import sharing_replicas
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.engines.base import EngineCaps
from mindspeed_asyncflow.engines.lifecycle import PAUSE_MODES
from mindspeed_asyncflow.engines.setup import RolloutSetup
from mindspeed_asyncflow.engines.step_backend import Finished, WantedWeight
from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.engines.weights import read_folder
from mindspeed_asyncflow.errors import ConfigError, EngineError
from mindspeed_asyncflow.records import GenRequest, SamplingSpec, WeightManifest
from mindspeed_asyncflow.reshard.relay import feed

START_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer to give."""

    ids: np.ndarray  # int64 [T]: the prompt, and what the answer has already
    place: int  # in the answer, of the token that comes first
    max_tokens: int  # that may still come
    stop_ids: frozenset[int]  # a token of these ends the answer, and is part of it
    sampling: SamplingSpec  # temperature (0: greedy), top_p, top_k
    seed: int


class BatchModel(Protocol):
    """What a user writes. All methods are called from one thread, which also made the object."""

    def answer(self, asks: Sequence[Ask]) -> Sequence[tuple[Sequence[int], Sequence[float]]]:
        """(token ids, their log-probabilities under the distribution that was sampled from) for each of `asks`."""
        ...

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """As `RolloutEngine.score`."""
        ...

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy all weights, by the names of the model folder."""
        ...


class BatchEngine(SteppedEngine):
    """Base of a rollout engine: `make` makes the model, in the thread that answers. Its weights come by the relay."""

    def __init__(self, name: str, setup: RolloutSetup, make: Callable[[], BatchModel]) -> None:
        super().__init__(
            name,
            lambda: _Backend(name, setup, make()),
            start_timeout_s=START_TIMEOUT_S,
            command_timeout_s=setup.rollout.timeout_s,
        )

    @staticmethod
    def check(config: Config) -> None:
        if sharing_replicas(config):
            key = "workflow.lend" if config.workflow.lend else "workflow.schedule"
            raise ConfigError(
                f"{key}: {config.rollout.engine} answers whole batches and cannot sleep, so it needs devices of its "
                "own: take schedule separated without lend, or another rollout.engine"
            )


class _Backend:
    """See `StepBackend`: a step is a batch."""

    def __init__(self, name: str, setup: RolloutSetup, model: BatchModel) -> None:
        self._setup, self._model = setup, model
        self._weights = read_folder(setup.model_folder)
        self.token_count = self._weights.token_count
        self._waiting: deque[GenRequest] = deque()
        self.caps = EngineCaps(
            name=name,
            pause_modes=PAUSE_MODES,
            sleep_levels=(),
            transports=("relay",),
            expert_parallel=False,
            notes="answers whole batches",
        )

    def check(self, request: GenRequest) -> None:
        length, most = len(request.prompt_ids) + request.sampling.max_tokens, self._setup.max_model_len
        if length > most:
            raise EngineError(f"request {request.request_id}: prompt and max_tokens are {length}, the model has {most}")
        self._weights.check_ids(request.request_id, request.prompt_ids)

    def admit(self, requests: Sequence[GenRequest]) -> None:
        self._waiting.extend(requests)

    def step(self) -> list[Finished]:
        count = min(len(self._waiting), self._setup.rollout.max_running)
        batch = [self._waiting.popleft() for _ in range(count)]
        asks = [self._ask(request) for request in batch]
        answers = self._model.answer(asks) if asks else []
        return [_finished(r, ask, *answer) for r, ask, answer in zip(batch, asks, answers, strict=True)]

    def _ask(self, request: GenRequest) -> Ask:
        begun = np.empty(0, np.int64) if request.resume_ids is None else request.resume_ids
        return Ask(
            np.concatenate([request.prompt_ids, begun]).astype(np.int64),
            len(begun),
            request.sampling.max_tokens - len(begun),
            frozenset(request.sampling.stop_token_ids or self._setup.stop_token_ids),
            request.sampling,
            request.seed,
        )

    def progress(self) -> dict[str, int]:
        return {request.request_id: 0 for request in self._waiting}

    def sampled(self, since: Mapping[str, int]) -> list[Finished]:
        return []  # between two batches nothing is half answered

    def abort(self, request_ids: Sequence[str]) -> list[Finished]:
        wanted = set(request_ids)
        ended = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
        return [Finished(request.request_id, (), (), "abort") for request in ended]

    def check_manifest(self, manifest: WeightManifest) -> None:
        self._weights.check(manifest)

    def load(self, manifest: WeightManifest) -> str:
        return feed(manifest, self._model.load)

    def weights_wanted(self) -> tuple[WantedWeight, ...]:
        raise EngineError(f"{self.caps.name} takes weights from the relay only")

    def generation_buffers(self) -> dict[str, torch.Tensor]:
        raise EngineError(f"{self.caps.name} takes weights from the relay only")

    def buffers_fingerprint(self) -> str:
        raise EngineError(f"{self.caps.name} takes weights from the relay only")

    def clear_caches(self) -> None:
        """A batch leaves none."""

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        return self._model.score(sequences)

    def sleep(self, level: int) -> None:
        raise EngineError(f"{self.caps.name} cannot sleep")

    def wake(self) -> None:
        raise EngineError(f"{self.caps.name} cannot sleep")

    def residual_bytes(self) -> int:
        raise EngineError(f"{self.caps.name} cannot sleep")

    def close(self) -> None:
        self._waiting.clear()


def _finished(request: GenRequest, ask: Ask, ids: Sequence[int], logprobs: Sequence[float]) -> Finished:
    """Raises `EngineError` for an answer that is none."""
    ids, logprobs = [int(i) for i in ids], [float(x) for x in logprobs]
    stopped = bool(ids) and ids[-1] in ask.stop_ids
    if len(ids) != len(logprobs) or len(ids) > ask.max_tokens or not (stopped or len(ids) == ask.max_tokens):
        raise EngineError(
            f"request {request.request_id}: {len(ids)} tokens with {len(logprobs)} log-probabilities; an answer ends "
            f"with one of {sorted(ask.stop_ids)} or has {ask.max_tokens} tokens"
        )
    if not ask.stop_ids.isdisjoint(ids[:-1]):
        raise EngineError(f"request {request.request_id}: the answer goes on behind a token that ends it")
    return Finished(request.request_id, ids, logprobs, "stop" if stopped else "length")
