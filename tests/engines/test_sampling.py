"""Sampling of the reference engine: exact values, exact support, and noise that knows no batch."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_asyncflow.engines.sampling import gumbel_noise, processed_logprobs, sample
from mindspeed_asyncflow.records import SamplingSpec

LOGITS = torch.tensor([[2.0, 1.0, 0.0]])


@pytest.mark.parametrize(("temperature", "value"), [(0.5, -0.14293), (1.0, -0.40761), (0.0, -0.40761)])
def test_temperature_divides_logits_once(temperature: float, value: float) -> None:
    """B22: dividing the log-probability instead would give -.81521."""
    logprobs = processed_logprobs(LOGITS, [SamplingSpec(1, temperature=temperature)])
    assert abs(logprobs[0, 0].item() - value) < 1e-5


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        (SamplingSpec(1, top_k=2), {0, 1}),
        (SamplingSpec(1, top_p=0.6), {0}),  # masses .665, .245, .090
        (SamplingSpec(1, top_p=0.7), {0, 1}),
        (SamplingSpec(1, top_p=0.95), {0, 1, 2}),
        (SamplingSpec(1, top_p=0.95, top_k=1), {0}),
        (SamplingSpec(1, temperature=0.1, top_p=0.95), {0}),  # truncation sees the scaled distribution
    ],
)
def test_truncation_keeps_the_smallest_set_and_renormalises(spec: SamplingSpec, kept: set[int]) -> None:
    logprobs = processed_logprobs(LOGITS, [spec])[0]
    assert {i for i, value in enumerate(logprobs.tolist()) if value > -math.inf} == kept
    assert abs(logprobs.exp().sum().item() - 1) < 1e-6


def test_rows_with_different_specs_do_not_touch_each_other() -> None:
    specs = [
        SamplingSpec(1),
        SamplingSpec(1, temperature=0.0),
        SamplingSpec(1, top_k=1),
        SamplingSpec(1, temperature=2.0),
    ]
    together = processed_logprobs(LOGITS.repeat(4, 1), specs)
    for row, spec in enumerate(specs):
        assert torch.equal(together[row], processed_logprobs(LOGITS, [spec])[0])


def test_noise_is_a_function_of_seed_and_position_only() -> None:
    """B83."""
    batch = gumbel_noise([5, 6, 5, 2**63 + 5], [0, 0, 1, 0], 11)
    assert torch.equal(batch[1:2], gumbel_noise([6], [0], 11))
    assert len({tuple(row.tolist()) for row in batch}) == 4
    assert torch.equal(batch[:, :7], gumbel_noise([5, 6, 5, 2**63 + 5], [0, 0, 1, 0], 7))


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_neighbouring_seeds_and_positions_draw_from_the_right_distribution(varied: str) -> None:
    """Chi-square over 20,000 draws, bound at about 1e-6 for 3 degrees of freedom."""
    count = 20_000
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    index = list(range(count))
    seeds, positions = (index, [0] * count) if varied == "seed" else ([0] * count, index)
    tokens, logprobs = sample(probs.log().repeat(count, 1), [SamplingSpec(1)] * count, seeds, positions)
    observed = torch.bincount(tokens, minlength=4)
    assert (((observed - count * probs) ** 2) / (count * probs)).sum().item() < 30
    assert torch.allclose(logprobs.exp(), probs[tokens])


def test_greedy_rows_ignore_noise() -> None:
    tokens, logprobs = sample(LOGITS.repeat(50, 1), [SamplingSpec(1, temperature=0.0)] * 50, list(range(50)), [0] * 50)
    assert tokens.tolist() == [0] * 50
    assert torch.allclose(logprobs, torch.full((50,), -0.40761), atol=1e-5)
