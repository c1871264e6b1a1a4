"""What the workflow needs from engines: small protocols, defined where they are used.

A `TrainEngine` lives in every trainer rank, a `CriticEngine` in every critic rank, a `RolloutEngine` in every rollout
replica. None knows Ray, the dock or the loops. All arrays that cross these interfaces are numpy on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mindspeed_asyncflow.observe.checkpoints import SavedFile
from mindspeed_asyncflow.records import (
    Completion,
    GenRequest,
    MicroBatch,
    OptimReport,
    UpdateReport,
    WeightManifest,
)


class TrainEngine(Protocol):
    """One rank of a trainer. Every method is collective, if not said otherwise: all ranks call it in the same order."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Add the gradient of the loss *sums* of `micro_batches` to the accumulated gradient.

        May be called several times before `optim_step`; the result does not depend on how samples are cut into
        micro-batches or calls. Returns metric sums over the given tokens (keys ending in `_sum`, `_count`,
        `_max`, `_min`), equal on all ranks of one data-parallel replica, not reduced over replicas.
        """
        ...

    def optim_step(self, denominator: float) -> OptimReport:
        """Divide the accumulated gradient by `denominator` (e.g. valid tokens of the *global* batch), clip, step.

        On a non-finite gradient all ranks skip together and weights stay as they are.
        """
        ...

    def logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float | None = None) -> list[np.ndarray]:
        """float32 [T] log-probabilities of `targets` for each micro-batch, no gradient, on every rank.

        `temperature` divides the logits; None: the temperature of training.
        """
        ...

    def begin_save(self, folder: str) -> None:
        """Model, optimizer, schedule and random states to host memory, from which this rank's part is then written to
        `folder` beside training. Between two steps. A save that nobody has finished is given up."""
        ...

    def finish_save(self) -> list[SavedFile]:
        """The files of this rank, names relative to the folder of `begin_save`, as soon as they are on the disk.

        Not collective, and may run beside all other methods. Raises `CheckpointError` where the disk refused,
        `DeadlineExceeded` where it takes nothing any more.
        """
        ...

    def load_checkpoint(self, folder: str) -> None:
        """Restore what all ranks saved to `folder`, which every rank must see; their parallel sizes may be others.

        Raises `CheckpointError`, naming the tensor, for the state of another model or type.
        """
        ...

    def shards(self) -> dict[str, Any]:
        """This rank's own parameters, torch tensors by their `LocalParam.name` in `layout`. No copy, not collective."""
        ...

    @property
    def layout(self) -> Any:
        """`reshard.layout.Layout` of all trainer ranks. Not collective."""
        ...

    def close(self) -> None: ...


class SharingTrainEngine(TrainEngine, Protocol):
    """One that can give its device to a replica (`workflow.schedule: colocated`, `workflow.lend`)."""

    def train_state(self) -> dict[str, list[Any]]:
        """All torch tensors that must leave the device while it generates: "train weights", "gradients", "optimizer".

        One tensor for each storage. Not collective; ask again after a step, since moments appear at the first one.
        """
        ...


class CriticEngine(Protocol):
    """One rank of a critic. Every method is collective: all ranks call it in the same order."""

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """float32 [T] of each micro-batch, no gradient, on every rank: the value of the state before `targets[t]`, at
        the positions at which log-probabilities are; 0 where `loss_mask` is 0."""
        ...

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """As `TrainEngine.forward_backward`; the micro-batches have `values` and `returns`."""
        ...

    def optim_step(self, denominator: float) -> OptimReport:
        """As `TrainEngine.optim_step`."""
        ...

    def begin_save(self, folder: str) -> None:
        """As `TrainEngine.begin_save`."""
        ...

    def finish_save(self) -> list[SavedFile]:
        """As `TrainEngine.finish_save`."""
        ...

    def load_checkpoint(self, folder: str) -> None:
        """As `TrainEngine.load_checkpoint`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineCaps:
    """What a rollout engine can do; callers ask instead of testing types."""

    name: str
    pause_modes: tuple[str, ...]  # of abort | wait | keep
    sleep_levels: tuple[int, ...]
    transports: tuple[str, ...]  # of relay | in_place (generation_buffers, loaded)
    expert_parallel: bool
    notes: str = ""


@dataclass(frozen=True, slots=True)
class Stream:
    """Somebody who wants to know what running answers have, before they end: `take` gets all that have grown, about
    every `every_s` seconds, with finish_reason "running", in the thread that iterates over the answers."""

    every_s: float
    take: Callable[[list[Completion]], None]


class RolloutEngine(Protocol):
    """One replica of a rollout engine. Thread-safe; `generate` may be called while other calls run.

    States: RUNNING -> PAUSED -> UPDATING -> PAUSED -> RUNNING; SLEEPING is entered from PAUSED only. A failure in
    UPDATING leaves DIRTY, which only a complete update (or a restart) leaves; nothing is generated while DIRTY.
    Transitions that are not named here raise `EngineError`.
    """

    def capabilities(self) -> EngineCaps: ...

    def generate(
        self, requests: Sequence[GenRequest], timeout_s: float, stream: Stream | None = None
    ) -> Iterator[Completion]:
        """Admit all requests as one batch and yield each answer as soon as it is complete.

        Blocks the calling thread only. Requests that arrive while the engine is paused wait for `resume`.
        """
        ...

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the named requests (all, if None): their `generate` yields them with finish_reason "abort" and
        the tokens sampled so far."""
        ...

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        """keep: freeze running requests; wait: drain them; abort: end them with what they have."""
        ...

    def resume(self) -> None: ...

    def update(self, manifest: WeightManifest) -> UpdateReport:
        """Pause (keep), load one relay version completely, clear every cache, resume: one guarded block.

        In-flight requests continue with the new weights; their spans record the cut. If the engine was paused by
        the caller before, it stays paused afterwards. Updates are refused for a version older than the served one
        unless the engine is DIRTY, or `go_back` came before.
        """
        ...

    def go_back(self) -> None:
        """All answers end as by `abort`, and the next update may lead to an older version: training goes on from an
        earlier state."""
        ...

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """For (prompt_ids [P], response_ids [L]) pairs: float32 [L] log-probabilities at temperature 1."""
        ...

    def reset_prefix_cache(self) -> None: ...

    def sleep(self, level: int = 1) -> None:
        """1: drop the caches; 2: drop the weights too."""
        ...

    def wake(self) -> None:
        """End the sleep. After level 2 the engine is DIRTY until a complete update."""
        ...

    @property
    def version(self) -> int:
        """Policy version of the weights that are served now."""
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the version that is served now."""
        ...

    @property
    def state(self) -> str:
        """RUNNING | PAUSED | UPDATING | SLEEPING | DIRTY"""
        ...

    def close(self) -> None: ...
