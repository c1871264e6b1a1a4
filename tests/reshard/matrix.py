"""Pairs of layouts that are verified bit for bit: small models of every family, cut in every way that fits 8 ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from mindspeed_asyncflow.config.model import ModelShape, describe
from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.reshard.layout import Layout
from mindspeed_asyncflow.reshard.rollout_layout import rollout_layout
from mindspeed_asyncflow.reshard.train_layout import train_layout

RANKS = 8

_DENSE = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 8, "intermediate_size": 48}
_MOE = {**_DENSE, "num_key_value_heads": 4, "head_dim": 8, "num_experts": 8, "moe_intermediate_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    # fewer key/value heads than most tensor sizes, biases, tied head, an odd vocabulary
    "qwen2": {
        **_DENSE, "model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 125, "tie_word_embeddings": True,
    },
    "qwen2.5": {**_DENSE, "model_type": "qwen2", "num_key_value_heads": 4, "vocab_size": 1003},
    # heads that are wider than hidden size over heads
    "qwen3": {**_DENSE, "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 8, "vocab_size": 128},
    "seven": {
        **_DENSE, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 96,
        "num_hidden_layers": 7, "tie_word_embeddings": True,
    },
    "qwen3_moe": {**_MOE, "model_type": "qwen3_moe", "vocab_size": 100, "num_key_value_heads": 2},
    "mixed_moe": {**_MOE, "model_type": "qwen3_moe", "vocab_size": 64, "num_experts": 6, "mlp_only_layers": [0, 2]},
    "deepseek": {
        **_DENSE, "model_type": "deepseek_v3", "vocab_size": 129, "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "n_routed_experts": 8, "moe_intermediate_size": 16, "n_shared_experts": 2,
    },
    # not in the matrix: large enough to time how one device turns from training to generation
    "large": {
        **_MOE, "model_type": "qwen3_moe", "hidden_size": 384, "num_attention_heads": 8, "head_dim": 64,
        "vocab_size": 4096, "num_experts": 16, "moe_intermediate_size": 256,
    },
}  # fmt: skip
SMALL = tuple(name for name in CONFIGS if name != "large")
MODELS: dict[str, ModelShape] = {name: describe(config) for name, config in CONFIGS.items()}


@dataclass(frozen=True)
class Case:
    """`apart`: rollout ranks follow the trainer's; else both sides are the same ranks."""

    model: str
    train: TrainParallel
    rollout: RolloutParallel
    apart: bool = False

    def __str__(self) -> str:
        cut = "".join(f" {count}" for count in self.train.pipeline_layers or ())
        return f"{self.model}: {self.train}{cut} -> {self.rollout}{', apart' if self.apart else ''}"

    @property
    def ranks(self) -> int:
        train, rollout = self.train.world_size, self.rollout.world_size
        return train + rollout if self.apart else max(train, rollout)

    @property
    def traits(self) -> set[str]:
        """What it is an example of."""
        model, train, rollout = MODELS[self.model], self.train, self.rollout
        moe = model.experts is not None
        ranks = rollout.tensor * rollout.data
        said = {
            "apart": self.apart,
            "dense": not moe,
            "tied over stages": model.tied and train.pipeline > 1,
            "padded vocabulary": bool(model.vocab % (train.vocab_multiple or train.tensor)),
            "kv heads < train TP": model.latent is None and model.kv_heads < train.tensor,
            "kv heads < rollout TP": model.latent is None and model.kv_heads < rollout.tensor,
            "TP up": train.tensor < rollout.tensor,
            "TP down": train.tensor > rollout.tensor,
            "PP uneven": train.pipeline_layers is not None and len(set(train.pipeline_layers)) > 1,
            "PP virtual": train.virtual > 1,
            "DP replicas": train.data > 1 or rollout.replicas > 1,
            "EP up": moe and rollout.expert and train.expert < ranks,
            "EP down": moe and train.expert > (ranks if rollout.expert else 1),
            "expert TP": moe and train.expert_tensor is not None,
            "latent attention": model.latent is not None,
        }
        return {name for name, true in said.items() if true}


_T, _R = TrainParallel, RolloutParallel
_DENSE_TRAIN = [
    _T(), _T(tensor=2), _T(pipeline=2), _T(pipeline=2, pipeline_layers=(3, 1)), _T(pipeline=2, virtual=2),
    _T(tensor=4), _T(tensor=2, pipeline=2), _T(pipeline=4), _T(tensor=2, data=2), _T(tensor=2, context=2),
    _T(tensor=2, pipeline=2, virtual=2, vocab_multiple=128),
    _T(tensor=8), _T(tensor=4, pipeline=2, vocab_multiple=16), _T(tensor=2, pipeline=4), _T(pipeline=4, data=2),
    _T(tensor=2, pipeline=2, data=2),
]  # fmt: skip
_SEVEN_TRAIN = [
    _T(pipeline=2, pipeline_layers=(4, 3)), _T(tensor=2, pipeline=2, pipeline_layers=(5, 2)),
    _T(tensor=2, pipeline=2, virtual=2, pipeline_layers=(2, 2, 2, 1)), _T(pipeline=4, pipeline_layers=(2, 2, 2, 1)),
]  # fmt: skip
_MOE_TRAIN = [
    _T(), _T(data=2, expert=2), _T(tensor=2, expert=2, expert_tensor=1), _T(tensor=2, data=2, expert=2),
    _T(tensor=2, data=2, expert=4, expert_tensor=1), _T(tensor=4, expert_tensor=2, expert=2), _T(data=4, expert=4),
    _T(tensor=2, pipeline=2, expert=2, expert_tensor=1), _T(pipeline=2, virtual=2, data=2, expert=2),
    _T(tensor=2, pipeline=2, data=2, expert=2, expert_tensor=2), _T(tensor=2, context=2, pipeline=2, expert=2),
    _T(tensor=4, data=2, expert=8, expert_tensor=1),
]  # fmt: skip
_ROLLOUT = [
    _R(), _R(tensor=2), _R(replicas=2), _R(data=2), _R(tensor=4), _R(tensor=2, replicas=2), _R(tensor=2, data=2),
    _R(tensor=8), _R(tensor=4, replicas=2), _R(replicas=4), _R(tensor=2, data=2, replicas=2),
]  # fmt: skip
_MOE_ROLLOUT = [_R(tensor=r.tensor, data=r.data, replicas=r.replicas, expert=True) for r in _ROLLOUT if r.replicas < 4]


@cache
def train_side(model: str, parallel: TrainParallel) -> Layout | None:
    """None: megatron could not cut the model like this."""
    try:
        return train_layout(MODELS[model], parallel)
    except ConfigError:
        return None


@cache
def rollout_side(model: str, parallel: RolloutParallel) -> Layout | None:
    """None: vLLM could not cut the model like this."""
    try:
        return rollout_layout(MODELS[model], parallel)
    except ConfigError:
        return None


def _key(case: Case) -> tuple[object, ...] | None:
    """Equal for cases whose ranks hold the same; None where it is not legal or does not fit."""
    train, rollout = train_side(case.model, case.train), rollout_side(case.model, case.rollout)
    if train is None or rollout is None or case.ranks > RANKS:
        return None
    return case.model, hash(train.ranks), hash(rollout.ranks), case.apart


def _pairs(model: str) -> Iterator[Case]:
    moe = MODELS[model].experts is not None
    deep = MODELS[model].layers
    trains = (_SEVEN_TRAIN if deep == 7 else []) + [t for t in _DENSE_TRAIN if not moe] + (_MOE_TRAIN if moe else [])
    for i, train in enumerate(trains):
        for k, rollout in enumerate(_ROLLOUT + (_MOE_ROLLOUT if moe else [])):
            if train.world_size == rollout.world_size:
                yield Case(model, train, rollout)
            elif (i + k) % 3 == 0:  # a third of what fits
                yield Case(model, train, rollout, apart=True)


def all_cases() -> list[Case]:
    """Every legal pair of the lists above. Pairs that differ in their names only (for a dense model, data-parallel
    ranks are replicas) are there once."""
    found: dict[object, Case] = {}
    for model in SMALL:
        for case in _pairs(model):
            key = _key(case)
            if key is not None:
                found.setdefault(key, case)
    return list(found.values())


def representative(count: int) -> list[Case]:
    """`count` cases or a few more that show every trait of the matrix, spread over the models."""
    cases = all_cases()
    chosen: list[Case] = []
    shown: set[str] = set()
    for case in cases:
        if case.traits - shown or not any(c.model == case.model for c in chosen):
            chosen.append(case)
            shown |= case.traits
    rest = [case for case in cases if case not in chosen]
    missing = max(0, count - len(chosen))
    return chosen + rest[:: max(1, len(rest) // missing)][:missing] if missing else chosen
