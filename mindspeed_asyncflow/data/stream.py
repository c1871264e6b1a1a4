"""The order in which prompts are trained on: a function of seed and position, whatever the ranks and replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mindspeed_asyncflow.errors import DataError

if TYPE_CHECKING:
    from mindspeed_asyncflow.data.prompts import Prompt, PromptSet

PromptBatch = list[tuple[int, int, "Prompt"]]  # (epoch, index in the training set, prompt)


class Order(Protocol):
    def epoch(self, number: int) -> np.ndarray:
        """int64 [rows]: indices into the training set, in the order of epoch `number`."""
        ...


class Shuffled:
    """One source: all rows once in each epoch, in an order that depends on seed and epoch only."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._seed = rows, seed

    def epoch(self, number: int) -> np.ndarray:
        return np.random.default_rng([self._seed, 1, number]).permutation(self._rows)


class Mixed:
    """Several sources: an epoch has a fixed number of rows of each, shuffled together.

    Each source goes through all of its rows, in an order of its own, before any of them comes again; the next epoch
    goes on where the last one ended, so a row of a source is never used two times more often than another.
    """

    def __init__(self, sizes: Sequence[int], quotas: Sequence[int], seed: int) -> None:
        self._sizes, self._quotas, self._seed = sizes, quotas, seed
        self._starts = np.cumsum([0, *sizes[:-1]])

    def epoch(self, number: int) -> np.ndarray:
        drawn = np.concatenate([self._draws(source, number) for source in range(len(self._sizes))])
        return np.random.default_rng([self._seed, 2, number]).permutation(drawn)

    def _draws(self, source: int, number: int) -> np.ndarray:
        size, quota = self._sizes[source], self._quotas[source]
        first, last = number * quota, (number + 1) * quota
        passes = [
            np.random.default_rng([self._seed, 3, source, through]).permutation(size)
            for through in range(first // size, -(-last // size))
        ]
        skipped = first - first // size * size
        return self._starts[source] + np.concatenate(passes)[skipped : skipped + quota]


def quotas(rows: int, weights: Sequence[float]) -> list[int]:
    """`rows` divided as `weights` say, by largest remainders (the first of equal ones). Sums to `rows`."""
    whole = sum(weights)
    exact = [rows * weight / whole for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for index in by_remainder[: rows - sum(shares)]:
        shares[index] += 1
    return shares


def order_of(facts: Mapping[str, Any]) -> Order:
    """As `PromptStream.facts` says."""
    if facts["quotas"]:
        return Mixed(facts["sizes"], facts["quotas"], facts["seed"])
    return Shuffled(sum(facts["sizes"]), facts["seed"])


def prompts_in_order(facts: Mapping[str, Any], epochs: int) -> Iterator[tuple[int, int]]:
    """(epoch, index in the training set) of every prompt that a stream with these facts gives out; without end where
    they come from a client."""
    if facts.get("client"):
        yield from ((0, index) for index in itertools.count())
    order = order_of(facts)
    for epoch in range(epochs):
        for index in order.epoch(epoch)[: facts["batches_per_epoch"] * facts["batch"]].tolist():
            yield epoch, index


class PromptStream:
    """Batches of training prompts, in a new order each epoch.

    An iterator: ends with `StopIteration`, and says so beforehand through `exhausted`.
    """

    def __init__(self, prompts: PromptSet, seed: int, epochs: int, drop_last: bool, batch: int) -> None:
        rows = len(prompts.train)
        if rows < batch and (drop_last or rows == 0):
            raise DataError(
                f"{rows} usable rows < batch {batch}: give more data, lower workflow.groups_per_step, "
                "or set data.drop_last: false"
            )
        self._prompts, self._seed, self._epochs, self._batch = prompts, seed, epochs, batch
        self.batches_per_epoch = rows // batch if drop_last else -(-rows // batch)
        self._quotas: list[int] = []
        if len(prompts.sizes) > 1:
            self._quotas = quotas(min(rows, self.batches_per_epoch * batch), prompts.weights)
            if 0 in self._quotas:
                raise DataError(
                    f"data.mix: weights {prompts.weights} leave source {self._quotas.index(0)} less than one of the "
                    f"{sum(self._quotas)} prompts of an epoch: raise its weight or give more data"
                )
        self._order = order_of(self.facts())
        self._position = 0  # batches given out so far
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # the last one drawn, its order

    @property
    def total_batches(self) -> int:
        return self.batches_per_epoch * self._epochs

    @property
    def exhausted(self) -> bool:
        return self._position >= self.total_batches

    def require(self, steps: int) -> None:
        """Raise `DataError` if fewer than `steps` batches can ever be given out."""
        if steps > self.total_batches:
            raise DataError(
                f"data ends after {self.total_batches} steps ({self._epochs} epochs x {self.batches_per_epoch}), "
                f"trainer.steps asks for {steps}: raise data.epochs or lower trainer.steps"
            )

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> PromptBatch:
        if self.exhausted:
            raise StopIteration
        epoch, slot = divmod(self._position, self.batches_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order.epoch(epoch))
        chosen = self._epoch[1][slot * self._batch : (slot + 1) * self._batch]
        self._position += 1
        return [(epoch, int(index), self._prompts.train[index]) for index in chosen]

    def facts(self) -> dict[str, Any]:
        """What the order depends on, as plain values (JSON); `sizes`: training prompts of each source."""
        return {
            "seed": self._seed,
            "batch": self._batch,
            "batches_per_epoch": self.batches_per_epoch,
            "sizes": list(self._prompts.sizes) or [len(self._prompts.train)],
            "quotas": self._quotas,
        }

    def state(self) -> dict[str, Any]:
        """Position as plain values (JSON)."""
        return {
            "position": self._position,
            "exhausted": self.exhausted,
            "seed": self._seed,
            "batch": self._batch,
            "batches_per_epoch": self.batches_per_epoch,
            "quotas": self._quotas,
            "prompts": self._prompts.fingerprint(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken; `epochs` may have grown since. Raises `DataError` on other data."""
        mine = self.state()
        for key in ("seed", "batch", "batches_per_epoch", "quotas", "prompts"):
            if state[key] != mine[key]:
                raise DataError(f"saved data position has {key}={state[key]!r}, this run has {mine[key]!r}")
        self._position = int(state["position"])
