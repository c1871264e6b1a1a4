"""Learning rate as a function of applied optimizer steps."""

from __future__ import annotations

import math

from mindspeed_asyncflow.config.schema import TrainerConfig


def learning_rate(step: int, trainer: TrainerConfig) -> float:
    """Rate of the optimizer step number `step` (0-based, skipped steps not counted).

    Rises linearly over `lr_warmup_steps` and reaches the peak at the last of them; then constant, or falling to 0 at
    `trainer.steps` (linear or half a cosine).
    """
    warmup = trainer.lr_warmup_steps
    if step < warmup:
        return trainer.lr * (step + 1) / warmup
    if trainer.lr_decay == "constant":
        return trainer.lr
    left = 1.0 - min(1.0, (step - warmup) / max(1, trainer.steps - warmup))
    if trainer.lr_decay == "linear":
        return trainer.lr * left
    return trainer.lr * 0.5 * (1.0 - math.cos(math.pi * left))
