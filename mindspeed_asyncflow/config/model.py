"""What a model consists of: every weight with its Hugging Face name and shape, from a config.json. Pure.

Families: Qwen2, Qwen2.5 and Qwen3 dense; Qwen3-MoE; DeepSeek-V3/R1 style (latent attention, shared experts, leading
dense layers). Multi-token-prediction layers are not part of the policy and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mindspeed_asyncflow.errors import ConfigError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class FullTensor:
    """One weight of a model under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    order: int  # position in layer order: embedding 0, decoder layer l is l + 1, final norm and head L + 1
    expert: int = -1  # number of the routed expert; -1: not a routed expert's weight
    dtype: str = ""  # kept in this type (torch name) whatever the model's type is; "": the model's


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention. All sizes are per head except the two ranks."""

    q_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope: int  # part of a query/key head without position
    rope: int  # part with position; the key's is shared by all heads
    value: int


@dataclass(frozen=True, slots=True)
class Experts:
    count: int
    width: int  # of one routed expert's feed-forward
    shared_width: int  # of all shared experts together; 0: none
    bias: bool  # the router has a per-expert correction bias
    dense_layers: frozenset[int]  # layers with an ordinary feed-forward


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model. `vocab` is the true vocabulary, without padding."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    latent: Latent | None = None
    experts: Experts | None = None

    def is_moe(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def attention(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Names (without prefix) and shapes of a layer's attention."""
        if self.latent is not None:
            return self._latent_attention(self.latent)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {}
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{part}_proj.weight"] = (rows, self.hidden)
            if self.qkv_bias:
                found[f"{part}_proj.bias"] = (rows,)
        if self.qk_norm:
            found |= {"q_norm.weight": (self.head_dim,), "k_norm.weight": (self.head_dim,)}
        return found | {"o_proj.weight": (self.hidden, queries)}

    def _latent_attention(self, latent: Latent) -> dict[str, tuple[int, ...]]:
        queries = self.heads * (latent.nope + latent.rope)
        found: dict[str, tuple[int, ...]] = {}
        if latent.q_rank:
            found["q_a_proj.weight"] = (latent.q_rank, self.hidden)
            found["q_a_layernorm.weight"] = (latent.q_rank,)
            found["q_b_proj.weight"] = (queries, latent.q_rank)
        else:
            found["q_proj.weight"] = (queries, self.hidden)
        return found | {
            "kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rope, self.hidden),
            "kv_a_layernorm.weight": (latent.kv_rank,),
            "kv_b_proj.weight": (self.heads * (latent.nope + latent.value), latent.kv_rank),
            "o_proj.weight": (self.hidden, self.heads * latent.value),
        }

    def feed_forward(self, width: int) -> dict[str, tuple[int, ...]]:
        return {
            "gate_proj.weight": (width, self.hidden),
            "up_proj.weight": (width, self.hidden),
            "down_proj.weight": (self.hidden, width),
        }

    @property
    def cached_per_token(self) -> int:
        """Elements that one layer caches of one token: keys and values, or the latent and the shared position key."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope
        return 2 * self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(_elements(self))

    @property
    def expert_parameters(self) -> int:
        """Elements of the routed experts' weights."""
        return _elements(self)[1]

    def tensors(self) -> dict[str, FullTensor]:
        """All weights in layer order."""
        return {t.name: t for t in self._tensors()}

    def _tensors(self) -> Iterator[FullTensor]:
        yield FullTensor(EMBEDDING, (self.vocab, self.hidden), 0)
        for layer in range(self.layers):
            yield from self._layer(layer)
        last = self.layers + 1
        yield FullTensor(FINAL_NORM, (self.hidden,), last)
        if not self.tied:
            yield FullTensor(HEAD, (self.vocab, self.hidden), last)

    def _layer(self, layer: int) -> Iterator[FullTensor]:
        prefix, order = f"model.layers.{layer}.", layer + 1
        yield FullTensor(f"{prefix}input_layernorm.weight", (self.hidden,), order)
        for name, shape in self.attention(layer).items():
            yield FullTensor(f"{prefix}self_attn.{name}", shape, order)
        yield FullTensor(f"{prefix}post_attention_layernorm.weight", (self.hidden,), order)
        experts = self.experts
        if experts is None or layer in experts.dense_layers:
            for name, shape in self.feed_forward(self.ffn).items():
                yield FullTensor(f"{prefix}mlp.{name}", shape, order)
            return
        yield FullTensor(f"{prefix}mlp.gate.weight", (experts.count, self.hidden), order)
        if experts.bias:
            yield FullTensor(f"{prefix}mlp.gate.e_score_correction_bias", (experts.count,), order, dtype="float32")
        for number in range(experts.count):
            for name, shape in self.feed_forward(experts.width).items():
                yield FullTensor(f"{prefix}mlp.experts.{number}.{name}", shape, order, expert=number)
        if experts.shared_width:
            for name, shape in self.feed_forward(experts.shared_width).items():
                yield FullTensor(f"{prefix}mlp.shared_experts.{name}", shape, order)


@lru_cache(maxsize=64)
def _elements(model: ModelShape) -> tuple[int, int]:
    """Outside and inside of routed experts; counted once, of up to 50,000 tensors."""
    found = [0, 0]
    for tensor in model._tensors():
        found[tensor.expert >= 0] += math.prod(tensor.shape)
    return found[0], found[1]


def describe(config: Mapping[str, Any]) -> ModelShape:
    """The model of a Hugging Face config.json. Raises `ConfigError` for an unknown family, a size that is missing or no
    positive whole number, and for what trainer and layouts do not know."""
    family = config.get("model_type")
    makers = {"qwen2": _dense, "qwen3": _dense, "qwen3_moe": _qwen_moe, "deepseek_v3": _deepseek}
    if family not in makers:
        raise ConfigError(f"model_type {family!r}: layouts are known for {', '.join(sorted(makers))}")
    if family != "qwen2" and config.get("attention_bias"):
        raise ConfigError(f"config.json: attention_bias is not supported for model_type {family!r}")
    model = makers[family](config)
    if model.latent is None and model.heads % model.kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads={model.kv_heads} does not divide num_attention_heads={model.heads}"
        )
    return model


def _size(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """`config[key]` as a whole number; an absent one or null is `default`, where there is one."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if key not in config:
        raise ConfigError(f"config.json of model_type {config.get('model_type')!r} has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"config.json: {key}={value!r} must be a whole number of at least {least}")
    return value


def _common(config: Mapping[str, Any], head_dim: int | None = None) -> dict[str, Any]:
    heads = _size(config, "num_attention_heads")
    return dict(
        family=config["model_type"],
        layers=_size(config, "num_hidden_layers"),
        hidden=_size(config, "hidden_size"),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=head_dim or _size(config, "head_dim"),
        ffn=_size(config, "intermediate_size"),
        vocab=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _dense(config: Mapping[str, Any]) -> ModelShape:
    if config["model_type"] == "qwen3":
        return ModelShape(**_common(config), qkv_bias=False, qk_norm=True)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    head_dim = _size(config, "head_dim", hidden // heads)
    if head_dim < 1:
        raise ConfigError(f"config.json: hidden_size={hidden} is too small for num_attention_heads={heads}")
    return ModelShape(**_common(config, head_dim), qkv_bias=True, qk_norm=False)


def _qwen_moe(config: Mapping[str, Any]) -> ModelShape:
    step, layers = _size(config, "decoder_sparse_step", 1), _size(config, "num_hidden_layers")
    dense = {n for n in range(layers) if (n + 1) % step} | set(config.get("mlp_only_layers") or ())
    experts = Experts(
        count=_size(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
        width=_size(config, "moe_intermediate_size"),
        shared_width=0,
        bias=False,
        dense_layers=frozenset(dense),
    )
    return ModelShape(**_common(config), qkv_bias=False, qk_norm=True, experts=experts)


def _deepseek(config: Mapping[str, Any]) -> ModelShape:
    if config.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"config.json: moe_layer_freq={config['moe_layer_freq']!r} is not supported, only 1")
    latent = Latent(
        q_rank=0 if config.get("q_lora_rank", 0) is None else _size(config, "q_lora_rank"),
        kv_rank=_size(config, "kv_lora_rank"),
        nope=_size(config, "qk_nope_head_dim"),
        rope=_size(config, "qk_rope_head_dim"),
        value=_size(config, "v_head_dim"),
    )
    width = _size(config, "moe_intermediate_size")
    experts = Experts(
        count=_size(config, "n_routed_experts"),
        width=width,
        shared_width=width * _size(config, "n_shared_experts", 0 if "n_shared_experts" in config else None, least=0),
        bias=True,
        dense_layers=frozenset(range(_size(config, "first_k_dense_replace", least=0))),
    )
    common = _common(config, latent.nope + latent.rope)
    return ModelShape(**common, qkv_bias=False, qk_norm=False, latent=latent, experts=experts)
