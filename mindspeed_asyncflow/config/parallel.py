"""Whether a model can be cut as the trainer settings say: pure arithmetic on the model's config.json."""

from __future__ import annotations

from typing import Any

from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.errors import ConfigError


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number` closest to `wanted` from below and from above."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d <= wanted]
    above = [d for d in divisors if d > wanted]
    return below[-1:] + above[:1]


def _divides(knob: str, wanted: int, what: str, number: int) -> None:
    if number % wanted:
        legal = " or ".join(map(str, nearest_divisors(number, wanted)))
        raise ConfigError(f"{knob}={wanted} does not divide the model's {what} ({number}); nearest legal: {legal}")


def check_parallel(model: dict[str, Any], trainer: TrainerConfig) -> None:
    """Raise `ConfigError` when `model` (a Hugging Face config.json as a dict) cannot be cut as `trainer` asks."""
    tp, pp, cp, ep = (
        trainer.tensor_parallel,
        trainer.pipeline_parallel,
        trainer.context_parallel,
        trainer.expert_parallel,
    )
    heads = model["num_attention_heads"]
    kv_heads = model.get("num_key_value_heads", heads)
    experts = model.get("num_experts") or model.get("num_local_experts") or 0
    _divides("trainer.tensor_parallel", tp, "attention heads", heads)
    _divides("trainer.tensor_parallel", tp, "key/value heads", kv_heads)
    if experts:
        _divides("trainer.tensor_parallel", tp, "expert width", model["moe_intermediate_size"])
    else:
        _divides("trainer.tensor_parallel", tp, "feed-forward width", model["intermediate_size"])
    _divides("trainer.context_parallel", cp, f"attention heads per tensor rank (TP={tp})", heads // tp)
    _check_pipeline(model["num_hidden_layers"], pp, trainer.virtual_pipeline)
    _check_experts(experts, ep, trainer.data_parallel * cp)
    if trainer.sequence_parallel and tp == 1:
        raise ConfigError("trainer.sequence_parallel needs trainer.tensor_parallel >= 2; set it to false")
    if experts and tp > 1 and not trainer.sequence_parallel:
        raise ConfigError("a mixture-of-experts model with trainer.tensor_parallel > 1 needs sequence_parallel: true")


def _check_pipeline(layers: int, pp: int, virtual: int | None) -> None:
    if virtual is not None and pp == 1:
        raise ConfigError("trainer.virtual_pipeline needs trainer.pipeline_parallel >= 2; leave it out")
    _divides("trainer.pipeline_parallel", pp, "layers", layers)
    if virtual is not None:
        _divides("trainer.virtual_pipeline", virtual, f"layers per pipeline rank (PP={pp})", layers // pp)


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
