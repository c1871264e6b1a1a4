"""Prompts as token ids, those for evaluation apart from those that are trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.data.sources import Source, Sources
from mindspeed_asyncflow.data.tokenizers import cut, encode_prompts, with_system
from mindspeed_asyncflow.errors import DataError

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import DataConfig


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: np.ndarray  # int32 [P], exactly what the engine gets
    truth: str
    text: str
    fields: str = "{}"  # JSON object for scorers and environments: prompt, id, source, and the data's other columns


def split_problems(problems: Sequence[Problem], heldout: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices of (training, held-out) problems. No prompt text is in both; repeated texts stay in training only.

    Depends on nothing but its arguments: whoever needs to stay away from the held-out prompts finds the same ones.
    """
    order = np.random.default_rng([seed, 0]).permutation(len(problems))
    apart: dict[str, int] = {}
    for index in order:
        if len(apart) == heldout:
            break
        apart.setdefault(problems[index].text, int(index))
    training = [index for index, problem in enumerate(problems) if problem.text not in apart]
    if len(apart) < heldout or not training:
        raise DataError(f"{len(problems)} problems are too few to hold out data.heldout={heldout} and still train")
    return training, list(apart.values())


Numbered = tuple[int, int, Problem]  # (number of its source, number in the source, problem)


@dataclass(frozen=True, slots=True)
class Problems:
    """What the sources gave, apart."""

    train: list[Numbered]  # in the order of the sources
    heldout: list[Numbered]
    notes: list[str]


def draw(sources: Sources, heldout: int, seed: int) -> Problems:
    """Make or read the problems of all sources and set those for evaluation apart.

    These are the validation sources' where there are some, else `heldout` ones of all. A training prompt that is
    asked in validation too is left out of training and counted.
    """
    made, notes = _made([*sources.train, *sources.validation], seed)
    first = len(sources.train)
    train = [each for each in made if each[0] < first]
    if not sources.validation:
        kept, apart = split_problems([problem for _, _, problem in train], heldout, seed)
        return Problems([train[index] for index in kept], [train[index] for index in apart], notes)
    validation = [each for each in made if each[0] >= first]
    asked = {problem.text for _, _, problem in validation}
    remaining = [each for each in train if each[2].text not in asked]
    if len(remaining) < len(train):
        both = len(train) - len(remaining)
        notes.append(f"{both} training prompts are also in data.validation and were left out of training")
    if not remaining:
        raise DataError("no usable rows: every training prompt is also in data.validation")
    return Problems(remaining, validation, notes)


def _made(sources: Sequence[Source], seed: int) -> tuple[list[Numbered], list[str]]:
    made: list[Numbered] = []
    notes: list[str] = []
    for number, source in enumerate(sources):
        made += [(number, index, problem) for index, problem in enumerate(source.problems(seed))]
        notes += source.notes
    return made, notes


@dataclass(frozen=True, slots=True)
class PromptSet:
    train: list[Prompt]  # in the order of the sources
    heldout: list[Prompt]
    dropped_too_long: int = 0  # of both parts
    sizes: list[int] = field(default_factory=list)  # training prompts of each source
    weights: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @classmethod
    def build(cls, sources: Sources, tokenizer: Any, data: DataConfig, seed: int) -> PromptSet:
        """Make or read, set apart, encode, and treat prompts above `data.max_prompt_tokens` as `data.too_long` says.

        Training and evaluation prompts go the same way, and are counted by the ids that the engine gets. Raises
        `DataError` where a source has no usable row, or a prompt is too long and that is refused.
        """
        problems = draw(sources, data.heldout, seed)
        heldout, dropped_heldout, cut_heldout = _encode(tokenizer, problems.heldout, data)
        found, dropped, shortened = _encode(tokenizer, problems.train, data)
        dropped, shortened = dropped + dropped_heldout, shortened + cut_heldout
        if not found:
            raise DataError(
                f"no usable rows: all {dropped} prompts are longer than data.max_prompt_tokens={data.max_prompt_tokens}"
            )
        if problems.heldout and not heldout:
            raise DataError(
                f"no usable evaluation prompts: all {len(problems.heldout)} are longer than "
                f"data.max_prompt_tokens={data.max_prompt_tokens}"
            )
        sizes = [0] * len(sources.train)
        for number, _ in found:
            sizes[number] += 1
        if 0 in sizes:
            raise DataError(f"no usable rows in source {sources.train[sizes.index(0)].task.name} of data.mix")
        said = list(problems.notes)
        if dropped:
            said.append(f"{dropped} prompts are longer than data.max_prompt_tokens and were dropped")
        if shortened:
            said.append(f"{shortened} prompts were cut to data.max_prompt_tokens={data.max_prompt_tokens} tokens")
        weights = [source.weight for source in sources.train]
        return cls([prompt for _, prompt in found], [prompt for _, prompt in heldout], dropped, sizes, weights, said)

    def notes(self) -> list[str]:
        """What was left out, cut or dropped, in words for the log; empty where all rows are used as they are."""
        return list(self.said)

    def fingerprint(self) -> str:
        """Hex digest of the training prompts, in order: tells whether a saved position still means the same."""
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self.train:
            digest.update(np.int64(len(prompt.ids)).tobytes() + prompt.ids.tobytes())
        return digest.hexdigest()


def _encode(
    tokenizer: Any, problems: Sequence[Numbered], data: DataConfig
) -> tuple[list[tuple[int, Prompt]], int, int]:
    """([(source, prompt)], how many were dropped, how many cut)."""
    asked = [with_system(problem.prompt, data.system_prompt if data.chat else None) for _, _, problem in problems]
    rows = encode_prompts(tokenizer, asked, data.chat)
    found: list[tuple[int, Prompt]] = []
    dropped = shortened = 0
    for (source, number, problem), prompt, ids in zip(problems, asked, rows):
        name = str(number) if problem.id is None else problem.id
        if not len(ids):
            raise DataError(f"a prompt is empty (id {name}, answer {problem.truth[:40]!r})")
        if len(ids) > data.max_prompt_tokens:
            if data.too_long == "error":
                raise DataError(
                    f"prompt {name} has {len(ids)} tokens, data.max_prompt_tokens is {data.max_prompt_tokens}: raise "
                    "it, or let data.too_long drop or cut such prompts"
                )
            if data.too_long == "drop":
                dropped += 1
                continue
            ids = cut(tokenizer, ids, data.max_prompt_tokens, data.too_long)
            shortened += 1
        fields = {**problem.fields, "prompt": prompt, "id": name, "source": source}
        found.append((source, Prompt(ids, problem.truth, problem.text, json.dumps(fields, ensure_ascii=False))))
    return found, dropped, shortened
