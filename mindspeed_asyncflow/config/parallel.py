"""Whether a model can be cut as the trainer settings say: pure arithmetic on the model's config.json."""

from __future__ import annotations

from typing import Any

from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.errors import ConfigError

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the name differs between model families


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number` closest to `wanted` from below and from above."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d <= wanted]
    above = [d for d in divisors if d > wanted]
    return below[-1:] + above[:1]


def balanced_split(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as equal as can be, larger stages first: 7 over 2 is [4, 3]."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def _divides(knob: str, wanted: int, what: str, number: int, otherwise: str = "") -> None:
    if number % wanted:
        legal = " or ".join(map(str, nearest_divisors(number, wanted)))
        raise ConfigError(
            f"{knob}={wanted} does not divide the model's {what} ({number}); nearest legal: {legal}{otherwise}"
        )


def check_parallel(model: dict[str, Any], trainer: TrainerConfig) -> None:
    """Raise `ConfigError` when `model` (a Hugging Face config.json as a dict) cannot be cut as `trainer` asks."""
    tp, cp, ep = trainer.tensor_parallel, trainer.context_parallel, trainer.expert_parallel
    heads = model["num_attention_heads"]
    kv_heads = model.get("num_key_value_heads", heads)
    experts = next((model[key] for key in EXPERT_COUNTS if model.get(key)), 0)
    _divides("trainer.tensor_parallel", tp, "attention heads", heads)
    if model.get("kv_lora_rank"):
        _check_latent(model, tp)
    elif kv_heads % tp and tp % kv_heads:  # several ranks may share a key/value head, whole ones each
        legal = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        near = [n for n in legal if n < tp][-1:] + [n for n in legal if n > tp][:1]
        raise ConfigError(
            f"trainer.tensor_parallel={tp} is neither a divisor nor a multiple of the model's key/value heads "
            f"({kv_heads}); nearest legal: {' or '.join(map(str, near))}"
        )
    if experts:
        _divides("trainer.tensor_parallel", tp, "expert width", model["moe_intermediate_size"])
    if not experts or model.get("first_k_dense_replace"):
        _divides("trainer.tensor_parallel", tp, "feed-forward width", model["intermediate_size"])
    _divides("trainer.context_parallel", cp, f"attention heads per tensor rank (TP={tp})", heads // tp)
    _check_pipeline(model["num_hidden_layers"], trainer)
    _check_experts(experts, ep, trainer.data_parallel * cp)
    if trainer.sequence_parallel and tp == 1:
        raise ConfigError("trainer.sequence_parallel needs trainer.tensor_parallel >= 2; set it to false")
    if experts and tp > 1 and not trainer.sequence_parallel:
        raise ConfigError("a mixture-of-experts model with trainer.tensor_parallel > 1 needs sequence_parallel: true")


def _check_latent(model: dict[str, Any], tp: int) -> None:
    """The down projections of latent attention are cut by rows, like all others."""
    if model.get("q_lora_rank"):
        _divides("trainer.tensor_parallel", tp, "q_lora_rank", model["q_lora_rank"])
    rows = model["kv_lora_rank"] + model["qk_rope_head_dim"]
    _divides("trainer.tensor_parallel", tp, "kv_lora_rank + qk_rope_head_dim", rows)


def _check_pipeline(layers: int, trainer: TrainerConfig) -> None:
    pp, virtual, given = trainer.pipeline_parallel, trainer.virtual_pipeline, trainer.pipeline_layers
    if virtual is not None and pp == 1:
        raise ConfigError("trainer.virtual_pipeline needs trainer.pipeline_parallel >= 2; leave it out")
    stages = pp * (virtual or 1)
    if given is not None:
        _check_pipeline_layers(layers, stages, given, trainer)
        return
    uneven = f", or uneven stages: trainer.pipeline_layers={balanced_split(layers, stages)}" if layers >= stages else ""
    _divides("trainer.pipeline_parallel", pp, "layers", layers, uneven)
    if virtual is not None:
        _divides("trainer.virtual_pipeline", virtual, f"layers per pipeline rank (PP={pp})", layers // pp, uneven)


def _check_pipeline_layers(layers: int, stages: int, given: list[int], trainer: TrainerConfig) -> None:
    if trainer.pipeline_parallel == 1:
        raise ConfigError("trainer.pipeline_layers needs trainer.pipeline_parallel >= 2; leave it out")
    if len(given) == stages and sum(given) == layers and min(given) >= 1:
        return
    made_of = f"pipeline_parallel={trainer.pipeline_parallel}"
    if trainer.virtual_pipeline is not None:
        made_of += f" x virtual_pipeline={trainer.virtual_pipeline}"
    legal = f"; balanced: {balanced_split(layers, stages)}" if layers >= stages else ""
    raise ConfigError(
        f"trainer.pipeline_layers={given} must name {stages} stages ({made_of}) of at least one layer each, "
        f"{layers} layers in all{legal}"
    )


def _check_experts(experts: int, ep: int, ranks: int) -> None:
    if ep == 1:
        return
    if not experts:
        raise ConfigError(f"trainer.expert_parallel={ep}, but the model has no experts; set it to 1")
    _divides("trainer.expert_parallel", ep, "experts", experts)
    if ranks % ep:
        legal = " or ".join(map(str, nearest_divisors(ranks, ep)))
        raise ConfigError(
            f"trainer.expert_parallel={ep} does not divide data_parallel x context_parallel = {ranks}, out of which "
            f"it is carved; nearest legal: {legal}"
        )
