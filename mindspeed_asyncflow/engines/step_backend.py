"""What a model must offer so that `SteppedEngine` can make a rollout engine of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from mindspeed_asyncflow.engines.base import EngineCaps
from mindspeed_asyncflow.records import GenRequest, WeightManifest


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that left the model: what was sampled since it was admitted (resumed tokens not included)."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reason: str  # stop | length | abort | error; running: it has not left


class WantedWeight(NamedTuple):
    """One weight as the engine wants it."""

    name: str  # of Hugging Face, experts one by one; a tied output head is not wanted
    dtype: str  # torch name, e.g. "bfloat16"
    shape: tuple[int, ...]


class StepBackend(Protocol):
    """One model and its running requests. All methods but `check` are called from the engine thread only."""

    caps: EngineCaps
    token_count: int  # ids that an answer may have are smaller

    def check(self, request: GenRequest) -> None:
        """Raise `EngineError` if this request can never run."""
        ...

    def admit(self, requests: Sequence[GenRequest]) -> None:
        """Take these requests, as one batch. They may wait inside until there is room."""
        ...

    def step(self) -> list[Finished]:
        """Sample one token for each running request; return those that are complete now."""
        ...

    def progress(self) -> dict[str, int]:
        """Tokens sampled since admission, for each unfinished request."""
        ...

    def sampled(self, since: Mapping[str, int]) -> list[Finished]:
        """What unfinished requests have sampled since admission, without the first so many tokens; they go on."""
        ...

    def abort(self, request_ids: Sequence[str]) -> list[Finished]:
        """End these admitted requests now, with what they have."""
        ...

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Raise `WeightSyncError` if names or shapes do not fit this model. Changes nothing."""
        ...

    def load(self, manifest: WeightManifest) -> str:
        """Replace all weights; return the fingerprint of the bytes that were loaded."""
        ...

    def weights_wanted(self) -> tuple[WantedWeight, ...]:
        """What a complete update consists of."""
        ...

    def generation_buffers(self) -> dict[str, torch.Tensor]:
        """The weights themselves by Hugging Face name. Raises `EngineError` where others must not write them."""
        ...

    def buffers_fingerprint(self) -> str:
        """`fingerprint_of` the generation buffers."""
        ...

    def clear_caches(self) -> None:
        """Drop all cached keys and values; running requests compute theirs again. Raises if that fails."""
        ...

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """float32 [L] log-probabilities at temperature 1 for (prompt [P], response [L]) pairs."""
        ...

    def sleep(self, level: int) -> None:
        """1: weights leave the device and come back at `wake`; 2: they are dropped. Caches are dropped by both."""
        ...

    def wake(self) -> None:
        """Device memory as before `sleep`; after level 2 the weights' contents are undefined."""
        ...

    def residual_bytes(self) -> int:
        """Bytes of weights and caches on the device now."""
        ...

    def close(self) -> None: ...
