"""Supervised warm-up of a generated model on mixed-quality demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.data.tokenizers import encode_prompts

if TYPE_CHECKING:
    import torch

    from mindspeed_asyncflow.data.tasks import Demonstrating

_IGNORED = -100  # label of positions that carry no loss


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The recipe. Every field changes the weights, so all of them are part of the cache key."""

    steps: int = 200
    batch: int = 128
    lr: float = 1e-3
    ramp: int = 20  # steps of linear rise
    decay_share: float = 0.4  # last share of the steps, over which the rate falls linearly
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    length_pool: int = 1  # batches that are sorted by length together, so that little is padded

    def rate(self, step: int) -> float:
        """Learning rate of 0-based `step`."""
        rise = min(1.0, (step + 1) / self.ramp)
        fall = min(1.0, (self.steps - step) / (self.decay_share * self.steps))
        return self.lr * rise * fall


def warm_up(
    model: Any,
    tokenizer: Any,
    task: Demonstrating,
    problems: Sequence[Problem],
    recipe: WarmUp,
    seed: int,
    log: Callable[[str], None],
) -> None:
    """Train `model` in place on demonstrations for `problems`; only answer tokens and EOS carry loss."""
    import torch

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    model.train()
    pool: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(recipe.steps):
        if not pool:
            pool = _batches(tokenizer, task, problems, recipe, rng)
        input_ids, labels = pool.pop()
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]  # [B, L-1, V]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0 or step + 1 == recipe.steps:
            log(f"warm-up step {step + 1}/{recipe.steps}, loss {loss.item():.3f}")
    model.eval()


def _batches(
    tokenizer: Any, task: Demonstrating, problems: Sequence[Problem], recipe: WarmUp, rng: random.Random
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`length_pool` batches of (input_ids [B, L], labels [B, L]), in random order."""
    chosen = rng.choices(problems, k=recipe.batch * recipe.length_pool)
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in chosen], chat=False)
    answers = encode_prompts(tokenizer, [task.demonstrate(problem, rng) for problem in chosen], chat=False)
    eos = tokenizer.eos_token_id
    rows = [(prompt.tolist(), [*answer.tolist(), eos]) for prompt, answer in zip(prompts, answers)]
    if recipe.length_pool > 1:
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    cuts = [rows[start : start + recipe.batch] for start in range(0, len(rows), recipe.batch)]
    rng.shuffle(cuts)
    return [_pad(cut, tokenizer.pad_token_id) for cut in cuts]


def _pad(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), _IGNORED)
    for index, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[index, :end] = torch.tensor(prompt + answer)
        labels[index, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels
