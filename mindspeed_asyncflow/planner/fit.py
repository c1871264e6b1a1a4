"""Costs from measured blocks: coefficients by least squares of relative errors, none of them negative. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.errors import ConfigError

# Which measured quantities a block's time is made of, and the coefficient of `Costs` for each. `one` is 1.
TERMS: dict[str, dict[str, str]] = {
    "generate": {
        "one": "prefill_call_s",
        "prompt_tokens": "prefill_token_s",
        "steps": "decode_weights_s",
        "tokens": "decode_row_s",
        "context": "decode_context_s",
    },
    "train": {
        "one": "train_call_s",
        "micro_batches": "train_micro_s",
        "tokens": "train_token_s",
        "squares": "train_square_s",
    },
    "score": {"one": "score_call_s", "rows": "score_row_s"},
    "reference": {"one": "forward_call_s", "tokens": "forward_token_s", "squares": "forward_square_s"},
    "optimizer": {"one": "optimizer_s"},
    "publish": {"one": "publish_s"},
    "load": {"one": "load_s"},
    "claim": {"one": "claim_s"},
}
NEEDED = ("generate", "train")
RIDGE = 1e-4


@dataclass(frozen=True, slots=True)
class Point:
    """One measured block: `amounts` by the names of `TERMS`, `seconds` that it took."""

    block: str
    amounts: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    coefficients: dict[str, float]  # fields of `Costs`, seconds
    errors: dict[str, float]  # block -> root mean square of relative errors


def fit(points: Sequence[Point]) -> Fit:
    """Raises `ConfigError` where a block that a plan needs was not measured, or its name is unknown."""
    blocks: dict[str, list[Point]] = {}
    for point in points:
        if point.block not in TERMS or point.seconds <= 0:
            raise ConfigError(f"profile: {point.block!r} taking {point.seconds} s is no measured block")
        blocks.setdefault(point.block, []).append(point)
    if missing := [name for name in NEEDED if name not in blocks]:
        raise ConfigError(f"profile: {', '.join(missing)} not measured")
    coefficients: dict[str, float] = {}
    errors: dict[str, float] = {}
    for block, members in blocks.items():
        terms = TERMS[block]
        seconds = np.array([p.seconds for p in members])
        amounts = np.array([[1.0 if t == "one" else p.amounts[t] for t in terms] for p in members])  # [n, terms]
        found = least_squares(amounts / seconds[:, None], np.ones(len(members)))
        coefficients |= dict(zip(terms.values(), found.tolist()))
        errors[block] = float(np.sqrt(np.mean((amounts @ found / seconds - 1.0) ** 2)))
    return Fit(coefficients, errors)


def least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """float64 [k], not negative, with the least sum of squares of `matrix @ x - target` ([n, k], [n]): the active-set
    method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23). Columns that say nearly the same
    share what they explain (a ridge of `RIDGE`)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = np.vstack([matrix / scale, np.sqrt(RIDGE) * np.eye(matrix.shape[1])])
    target = np.concatenate([target, np.zeros(matrix.shape[1])])
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * a.shape[1]):
        gain = a.T @ (target - a @ x)
        gain[free] = -np.inf
        if gain.max(initial=-np.inf) <= 1e-10:
            break
        free[int(np.argmax(gain))] = True
        while True:
            inside = np.zeros_like(x)
            inside[free] = np.linalg.lstsq(a[:, free], target, rcond=1e-10)[0]
            if (inside[free] > 0).all():
                x = inside
                break
            shrinking = free & (inside <= 0)
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.where(shrinking, x / (x - inside), np.inf)
            x = x + min(1.0, float(np.nanmin(steps))) * (inside - x)
            free &= x > 1e-14
    return x / scale
