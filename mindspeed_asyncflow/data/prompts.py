"""Prompts as token ids, held-out ones apart, and the order in which they are trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.data.tokenizers import encode_prompts
from mindspeed_asyncflow.errors import DataError

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import DataConfig
    from mindspeed_asyncflow.data.tasks import Task


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: np.ndarray  # int32 [P]
    truth: str
    text: str
    fields: str = "{}"  # JSON object for scorers and environments


def split_problems(problems: Sequence[Problem], heldout: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) problems. No prompt text is in both; repeated texts stay in training only.

    Depends on nothing but its arguments: whoever needs to stay away from the held-out prompts finds the same ones.
    """
    order = np.random.default_rng([seed, 0]).permutation(len(problems))
    kept_apart: dict[str, Problem] = {}
    for index in order:
        if len(kept_apart) == heldout:
            break
        kept_apart.setdefault(problems[index].text, problems[index])
    training = [problem for problem in problems if problem.text not in kept_apart]
    if len(kept_apart) < heldout or not training:
        raise DataError(f"{len(problems)} problems are too few to hold out data.heldout={heldout} and still train")
    return training, list(kept_apart.values())


@dataclass(frozen=True, slots=True)
class PromptSet:
    train: list[Prompt]
    heldout: list[Prompt]
    dropped_too_long: int  # of both parts

    @classmethod
    def build(cls, task: Task, tokenizer: Any, data: DataConfig, seed: int) -> PromptSet:
        """Make, split, encode; prompts of more than `data.max_prompt_tokens` tokens are dropped and counted."""
        parts = split_problems(task.problems(data.size, seed), data.heldout, seed)
        encoded = [_encode(tokenizer, part, data.chat) for part in parts]
        train, heldout = ([p for p in part if len(p.ids) <= data.max_prompt_tokens] for part in encoded)
        dropped = sum(map(len, encoded)) - len(train) - len(heldout)
        if not train:
            raise DataError(
                f"no usable rows: all {dropped} prompts are longer than data.max_prompt_tokens={data.max_prompt_tokens}"
            )
        return cls(train, heldout, dropped)

    def fingerprint(self) -> str:
        """Hex digest of the training prompts, in order: tells whether a saved position still means the same."""
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self.train:
            digest.update(np.int64(len(prompt.ids)).tobytes() + prompt.ids.tobytes())
        return digest.hexdigest()


def _encode(tokenizer: Any, problems: Sequence[Problem], chat: bool) -> list[Prompt]:
    rows = encode_prompts(tokenizer, [problem.prompt for problem in problems], chat)
    for problem, ids in zip(problems, rows):
        if not len(ids):
            raise DataError(f"a prompt is empty (answer {problem.truth[:40]!r})")
    return [Prompt(ids=ids, truth=problem.truth, text=problem.text) for problem, ids in zip(problems, rows)]


PromptBatch = list[tuple[int, int, Prompt]]  # (epoch, index in the training set, prompt)


class PromptStream:
    """Batches of training prompts, in a new order each epoch that depends on seed and epoch only.

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
        self._position = 0  # batches given out so far
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # (epoch, its order)

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
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, 1, epoch]).permutation(len(self._prompts.train)))
        chosen = self._order[1][slot * self._batch : (slot + 1) * self._batch]
        self._position += 1
        return [(epoch, int(index), self._prompts.train[index]) for index in chosen]

    def state(self) -> dict[str, Any]:
        """Position as plain values (JSON)."""
        return {
            "position": self._position,
            "exhausted": self.exhausted,
            "seed": self._seed,
            "batch": self._batch,
            "batches_per_epoch": self.batches_per_epoch,
            "prompts": self._prompts.fingerprint(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken; `epochs` may have grown since. Raises `DataError` on other data."""
        mine = self.state()
        for key in ("seed", "batch", "batches_per_epoch", "prompts"):
            if state[key] != mine[key]:
                raise DataError(f"saved data position has {key}={state[key]!r}, this run has {mine[key]!r}")
        self._position = int(state["position"])
