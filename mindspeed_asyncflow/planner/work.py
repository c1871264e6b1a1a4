"""What one token of a model computes, reads and keeps: counts of weights and operations, from sizes alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mindspeed_asyncflow.config.model import ModelShape, describe
from mindspeed_asyncflow.errors import ConfigError


@dataclass(frozen=True)
class Work:
    """Sizes of a model as the step-time model needs them. Counts are elements, not bytes."""

    shape: ModelShape
    active_experts: int = 0  # routed experts that one token uses

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Work:
        """From a Hugging Face config.json. Raises `ConfigError` for what `describe` does not know."""
        shape = describe(config)
        active = config.get("num_experts_per_tok") if shape.experts is not None else 0
        if not isinstance(active, int) or active < 0 or (shape.experts is not None and active < 1):
            raise ConfigError(f"config.json: num_experts_per_tok={active!r} must be a whole number of at least 1")
        return cls(shape, active)

    @cached_property
    def layer_dense(self) -> tuple[int, ...]:
        """Weights of each layer outside its routed experts."""
        shape = self.shape
        attention = sum(math.prod(s) for s in shape.attention(0).values()) + 2 * shape.hidden
        found = []
        for layer in range(shape.layers):
            if shape.experts is not None and shape.is_moe(layer):
                experts = shape.experts
                rest = experts.count * shape.hidden + 3 * shape.hidden * experts.shared_width
            else:
                rest = 3 * shape.hidden * shape.ffn
            found.append(attention + rest)
        return tuple(found)

    @cached_property
    def layer_experts(self) -> tuple[int, ...]:
        """Weights of each layer's routed experts."""
        shape = self.shape
        if shape.experts is None:
            return (0,) * shape.layers
        size = 3 * shape.hidden * shape.experts.width * shape.experts.count
        return tuple(size if shape.is_moe(layer) else 0 for layer in range(shape.layers))

    @property
    def expert_share(self) -> float:
        """Routed experts that a token uses / all of a layer."""
        return self.active_experts / self.shape.experts.count if self.shape.experts is not None else 0.0

    @cached_property
    def layer_active(self) -> tuple[float, ...]:
        """Weights of each layer that one token is multiplied with."""
        share = self.expert_share
        return tuple(dense + share * experts for dense, experts in zip(self.layer_dense, self.layer_experts))

    @property
    def vocabulary(self) -> int:
        """Weights of the embedding, and of the head where it is not the same matrix."""
        return self.shape.vocab * self.shape.hidden

    @cached_property
    def dense(self) -> int:
        """Weights that every token reads: all but routed experts and the embedding, the head included."""
        return sum(self.layer_dense) + self.vocabulary + self.shape.hidden

    @cached_property
    def experts(self) -> int:
        return sum(self.layer_experts)

    @cached_property
    def active(self) -> float:
        """Weights that one token is multiplied with, the head included."""
        return sum(self.layer_active) + self.vocabulary

    @cached_property
    def parameters(self) -> int:
        return self.dense + self.experts + (0 if self.shape.tied else self.vocabulary)

    @cached_property
    def square_operations(self) -> float:
        """Operations of causal attention forward, per squared token of a sample: scores and their sum over values take
        2 each per pair of positions, of which half are masked."""
        shape = self.shape
        if shape.latent is not None:
            width = shape.latent.nope + shape.latent.rope + shape.latent.value
        else:
            width = 2 * shape.head_dim
        return float(shape.layers * shape.heads * width)

    @property
    def cached(self) -> int:
        """Elements of the key/value cache per token, over all layers."""
        return self.shape.layers * self.shape.cached_per_token

    def cache_cut(self, tensor: int) -> int:
        """Into how many parts tensor parallelism cuts the cache: by key/value heads; a latent cache not at all."""
        return 1 if self.shape.latent is not None else min(tensor, self.shape.kv_heads)

    @cached_property
    def layer_activations(self) -> float:
        """Elements that one token leaves for the backward pass in one layer: the input of every matrix, norm and
        non-linearity (attention without its score matrix)."""
        shape = self.shape
        if shape.latent is not None:
            latent = shape.latent
            queries = shape.heads * (2 * (latent.nope + latent.rope) + 2 * latent.value)
            attention = queries + 2 * (latent.q_rank + latent.kv_rank)
        else:
            attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
        if shape.experts is not None:
            ffn = 3 * shape.experts.shared_width + self.active_experts * (2 * shape.hidden + 3 * shape.experts.width)
        else:
            ffn = 3 * shape.ffn
        return float(5 * shape.hidden + attention + ffn)


def stage_split(work: Work, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage so that the busiest stage has the least to compute, in order; the last one has the
    head too. Raises `ConfigError` for more stages than layers."""
    layers = work.shape.layers
    if stages > layers:
        raise ConfigError(f"{layers} layers do not fill {stages} pipeline stages")
    cost = [*work.layer_active[:-1], work.layer_active[-1] + work.vocabulary]
    low, high = max(cost), sum(cost)
    for _ in range(40):
        middle = (low + high) / 2
        if _fill(cost, stages, middle) is None:
            low = middle
        else:
            high = middle
    found = _fill(cost, stages, high)
    assert found is not None, "the whole model fits into its own cost"
    return found


def _fill(cost: list[float], stages: int, most: float) -> tuple[int, ...] | None:
    """Layers per stage with no stage above `most`, from the last stage on; None where more stages were needed."""
    counts: list[int] = []
    used, count = 0.0, 0
    for number in range(len(cost) - 1, -1, -1):
        must_leave = number + 1 < stages - len(counts)  # each stage before needs a layer
        if count and (used + cost[number] > most or must_leave):
            counts.append(count)
            used, count = 0.0, 0
        used, count = used + cost[number], count + 1
    counts.append(count)
    if len(counts) > stages:
        return None
    while len(counts) < stages:  # fewer stages would do: cut the largest in two
        largest = max(range(len(counts)), key=lambda i: counts[i])
        if counts[largest] < 2:
            return None
        counts[largest : largest + 1] = [counts[largest] // 2, counts[largest] - counts[largest] // 2]
    return tuple(reversed(counts))
