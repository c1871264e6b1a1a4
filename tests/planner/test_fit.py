"""Fitted coefficients give back the costs that made the measurements."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.fit import Point, fit, least_squares


def points(noise: float = 0.0) -> list[Point]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(30):
        prompts, tokens = float(rng.integers(100, 5000)), float(rng.integers(100, 5000))
        steps, context = float(rng.integers(10, 500)), float(rng.integers(1e4, 1e6))
        seconds = 0.02 + 1e-5 * prompts + 2e-3 * steps + 1e-4 * tokens + 1e-7 * context
        amounts = {"prompt_tokens": prompts, "steps": steps, "tokens": tokens, "context": context}
        found.append(Point("generate", amounts, seconds * (1 + noise * rng.normal())))
        micro, squares = float(rng.integers(1, 9)), tokens * 300
        seconds = 0.01 + 0.005 * micro + 5e-5 * tokens
        amounts = {"micro_batches": micro, "tokens": tokens, "squares": squares}
        found.append(Point("train", amounts, seconds * (1 + noise * rng.normal())))
    return found


def test_exact_measurements_give_their_coefficients():
    found = fit(points())
    assert found.coefficients["decode_weights_s"] == pytest.approx(2e-3, rel=0.02)
    assert found.coefficients["decode_row_s"] == pytest.approx(1e-4, rel=0.05)
    assert found.coefficients["train_micro_s"] == pytest.approx(0.005, rel=0.05)
    assert max(found.errors.values()) < 0.01


def test_columns_that_say_the_same_share_what_they_explain():
    found = fit(points()).coefficients
    ratio = found["train_square_s"] * 300 / found["train_token_s"]
    assert 0.5 < ratio < 2


def test_noise_shows_in_the_errors_and_no_coefficient_is_negative():
    found = fit(points(noise=0.1))
    assert 0.05 < found.errors["generate"] < 0.2
    assert min(found.coefficients.values()) >= 0


def test_a_pull_below_zero_ends_at_zero():
    x = least_squares(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([3.0, 2.0, 1.0]))
    assert x[1] == 0 and x[0] == pytest.approx(2.0, rel=1e-3)


def test_blocks_that_a_plan_needs_must_be_there():
    with pytest.raises(ConfigError, match="train not measured"):
        fit([p for p in points() if p.block == "generate"])
    with pytest.raises(ConfigError, match="'lunch' taking"):
        fit([Point("lunch", {}, 1.0)])
