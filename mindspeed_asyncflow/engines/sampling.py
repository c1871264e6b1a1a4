"""Sampling for the reference engine: noise is a pure function of (seed, position, token), never of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mindspeed_asyncflow.records import SamplingSpec

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014): uint64 in, well-mixed uint64 out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> torch.Tensor:
    """float32 [B, V] standard Gumbel noise. Row b depends on seeds[b] and positions[b] only."""
    with np.errstate(over="ignore"):
        stream = _mix(np.asarray([s & (2**64 - 1) for s in seeds], dtype=np.uint64) * _GOLDEN + _GOLDEN)
        stream = _mix(stream + np.asarray(positions, dtype=np.uint64) * _GOLDEN)  # [B]
        bits = _mix(stream[:, None] + np.arange(1, vocab + 1, dtype=np.uint64)[None, :] * _GOLDEN)  # [B, V]
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1), both ends excluded
    return torch.from_numpy(-np.log(-np.log(uniform))).float()


def processed_logprobs(logits: torch.Tensor, specs: Sequence[SamplingSpec]) -> torch.Tensor:
    """float32 [B, V] log-probabilities of what each row samples from: logits over T, truncated, normalised.

    Temperature 0 (greedy) gives the log-softmax of the raw logits. Outside a truncation the value is -inf.
    """
    temperature = torch.tensor([spec.temperature or 1.0 for spec in specs])  # [B]
    scaled = logits.float() / temperature[:, None]
    for row, spec in enumerate(specs):
        if spec.top_k > 0 or spec.top_p < 1.0:
            scaled[row] = _truncate(scaled[row], spec)
    return scaled.log_softmax(dim=-1)


def _truncate(logits: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    """[V] with everything outside the k likeliest tokens, then outside the smallest set of mass >= top_p, at -inf."""
    values, order = logits.sort(descending=True)
    if 0 < spec.top_k < len(values):
        values[spec.top_k :] = -torch.inf
    if spec.top_p < 1.0:
        mass = values.softmax(dim=-1).cumsum(dim=-1)
        values[1:][mass[:-1] >= spec.top_p] = -torch.inf  # the first token always stays
    return torch.empty_like(logits).scatter_(0, order, values)


def sample(
    logits: torch.Tensor, specs: Sequence[SamplingSpec], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row of [B, V] logits: (token ids int64 [B], their log-probabilities float32 [B])."""
    logprobs = processed_logprobs(logits, specs)
    noise = gumbel_noise(seeds, positions, logits.shape[-1])
    greedy = torch.tensor([spec.temperature == 0.0 for spec in specs])
    noise[greedy] = 0.0
    tokens = (logprobs + noise).argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
