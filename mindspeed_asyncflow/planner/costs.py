"""How long the blocks of a run take: one replica, one data-parallel replica of the trainer, one transfer. Pure.

The coefficients are plain fields, in seconds, whoever made them: `planner/analytic.py` from sizes and peaks, or
`asyncflow profile` from measurements. Arguments may be numbers or numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from mindspeed_asyncflow.errors import ConfigError

Number = TypeVar("Number", float, np.ndarray)

# Fields that `scaled` multiplies, by side.
SIDES: dict[str, tuple[str, ...]] = {
    "rollout": (
        *("prefill_call_s", "prefill_token_s", "prefill_square_s", "decode_call_s", "decode_weights_s"),
        *("decode_experts_s", "decode_answer_s", "decode_context_s", "decode_row_s"),
    ),
    "train": (
        *("train_call_s", "train_micro_s", "train_token_s", "train_square_s", "optimizer_s"),
        *("forward_call_s", "forward_token_s", "forward_square_s"),
    ),
    "transfer": ("publish_s", "fetch_s", "load_s", "give_s", "take_s"),
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. `decode_s` follows the roofline: reading weights and computing answers overlap, the longer one counts;
    reading the cache and the work per row come on top."""

    prefill_token_s: float
    decode_weights_s: float  # reading all weights but those of routed experts, once per decoding step
    decode_context_s: float  # reading the cache of one token
    train_token_s: float  # forward and backward of one token, without attention to others
    prefill_call_s: float = 0.0
    prefill_square_s: float = 0.0  # attention, per squared token
    decode_call_s: float = 0.0  # what a decoding step takes whatever it holds
    decode_experts_s: float = 0.0  # reading the weights of all routed experts
    expert_share: float = 0.0  # experts that one token uses / all; 0: no experts
    decode_answer_s: float = 0.0  # computing one token of one answer
    decode_row_s: float = 0.0  # scheduling and sampling per answer, in every step
    train_call_s: float = 0.0  # of one chunk of a step
    train_micro_s: float = 0.0  # of one micro-batch
    train_square_s: float = 0.0
    bubble: float = 0.0  # micro-batches' time that a pipeline of the trainer idles per chunk: (PP - 1) / virtual
    optimizer_s: float = 0.0
    forward_call_s: float = 0.0  # reference log-probabilities
    forward_token_s: float = 0.0
    forward_square_s: float = 0.0
    score_row_s: float = 0.0
    score_call_s: float = 0.0
    publish_s: float = 0.0  # trainer to the host memory of its nodes, beside training
    fetch_s: float = 0.0  # from there to the node of a replica
    load_s: float = 0.0  # from host memory into a replica
    give_s: float = 0.0  # colocated: from training to generating
    take_s: float = 0.0  # and back
    claim_s: float = 0.0  # one round trip to the dock

    def prefill_s(self, tokens: Number, squares: float = 0.0) -> Number:
        """Prompts of `tokens` tokens in all; `squares`: sum of squared lengths."""
        return self.prefill_call_s + self.prefill_token_s * tokens + self.prefill_square_s * squares  # type: ignore

    def decode_s(self, running: Number, context_tokens: Number) -> Number:
        """One token for each of `running` answers, whose prompts and tokens so far are `context_tokens` in all."""
        weights = self.decode_weights_s + 0.0 * running
        if self.expert_share:  # experts hit when every answer picks its own at random
            weights = weights + self.decode_experts_s * (1.0 - (1.0 - self.expert_share) ** running)
        matrices = np.maximum(weights, self.decode_answer_s * running)
        rest = self.decode_context_s * context_tokens + self.decode_row_s * running
        return self.decode_call_s + matrices + rest  # type: ignore

    def train_s(self, tokens: Number, squares: Number, micro_batches: Number) -> Number:
        """Forward and backward of one data-parallel replica over a chunk in `micro_batches` equal ones; `squares`: sum
        of squared sample lengths."""
        work = self.train_micro_s * micro_batches + self.train_token_s * tokens + self.train_square_s * squares
        return self.train_call_s + work * (1.0 + self.bubble / np.maximum(micro_batches, 1))  # type: ignore

    def forward_s(self, tokens: Number, squares: float = 0.0) -> Number:
        """Log-probabilities of a frozen model (reference)."""
        return self.forward_call_s + self.forward_token_s * tokens + self.forward_square_s * squares  # type: ignore

    def score_s(self, rows: Number) -> Number:
        return self.score_call_s + self.score_row_s * rows  # type: ignore

    def scaled(self, rollout: float = 1.0, train: float = 1.0, transfer: float = 1.0) -> Costs:
        """The same with every time of a side multiplied."""
        factors = (("rollout", rollout), ("train", train), ("transfer", transfer))
        changed = {name: getattr(self, name) * factor for side, factor in factors for name in SIDES[side]}
        return replace(self, **changed)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Costs:
        """From `to_dict`. Raises `ConfigError` for unknown, missing and impossible values."""
        known = {field.name for field in fields(cls)}
        if wrong := set(values) - known:
            raise ConfigError(f"costs: {', '.join(sorted(wrong))} unknown; there are {', '.join(sorted(known))}")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
                raise ConfigError(f"costs: {name}={value!r} must be a number of seconds, not negative")
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise ConfigError(f"costs: {', '.join(missing)} missing")
        return cls(**{k: float(v) for k, v in values.items()})
