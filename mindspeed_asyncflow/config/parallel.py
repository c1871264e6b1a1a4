"""Whether a model can be cut as trainer or rollout want it: pure arithmetic on the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_asyncflow.config.model import ModelShape, describe
from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TrainParallel:
    """How the trainer cuts the model."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # model chunks per pipeline rank
    context: int = 1
    data: int = 1
    expert: int = 1  # carved out of tensor x context x data
    expert_tensor: int | None = None  # TP of experts; None: `tensor`
    # Layers of each stage in model order, virtual ones included: stage s is chunk s // pipeline of rank s % pipeline.
    pipeline_layers: tuple[int, ...] | None = None
    vocab_multiple: int | None = None  # the vocabulary is padded to a multiple of it; None: `tensor`
    split_latent_down: bool = True  # latent down projections are cut over TP (local spec), or on every rank (TE spec)

    @classmethod
    def of(cls, trainer: TrainerConfig) -> TrainParallel:
        return cls(
            tensor=trainer.tensor_parallel,
            pipeline=trainer.pipeline_parallel,
            virtual=trainer.virtual_pipeline or 1,
            context=trainer.context_parallel,
            data=trainer.data_parallel,
            expert=trainer.expert_parallel,
            pipeline_layers=None if trainer.pipeline_layers is None else tuple(trainer.pipeline_layers),
        )

    @property
    def world_size(self) -> int:
        return self.stage_ranks * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def experts_tensor(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    def __str__(self) -> str:
        sizes = [("TP", self.tensor), ("PP", self.pipeline), ("VPP", self.virtual), ("CP", self.context)]
        sizes += [("DP", self.data), ("EP", self.expert)]
        parts = [f"{name}{size}" for name, size in sizes if size > 1]
        parts += [f"ETP{self.expert_tensor}"] if self.expert_tensor is not None else []
        return " ".join(parts) or "1 rank"


@dataclass(frozen=True, slots=True)
class RolloutParallel:
    """How rollout cuts the model. Rank = (replica * data + data rank) * tensor + tensor rank."""

    tensor: int = 1
    data: int = 1  # data-parallel ranks inside one replica
    expert: bool = False  # whole experts are dealt over the tensor x data ranks of a replica; else their width is cut
    replicas: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.data * self.replicas

    def __str__(self) -> str:
        text = f"TP{self.tensor} DP{self.data}" + (f" EP{self.tensor * self.data}" if self.expert else "")
        return f"{self.replicas} x {text}" if self.replicas > 1 else text


# ---- refusals that name the setting, the reason and the nearest legal sizes ------------------------------------------


def nearest(wanted: int, is_legal: Callable[[int], bool], largest: int) -> str:
    """The legal sizes closest to `wanted` from below and from above, as text; sizes up to `largest` are tried."""
    below = next((n for n in range(min(wanted, largest), 0, -1) if is_legal(n)), None)
    above = next((n for n in range(wanted + 1, largest + 1) if is_legal(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None) or "none"


def divides(knob: str, size: int, what: str, number: int, otherwise: str = "") -> None:
    """Raise `ConfigError` unless `number` can be cut into `size` equal parts."""
    if number % size:
        legal = nearest(size, lambda n: number % n == 0, number)
        raise ConfigError(
            f"{knob}={size} does not divide the model's {what} ({number}); nearest legal: {legal}{otherwise}"
        )


def serves_kv_heads(knob: str, size: int, model: ModelShape) -> None:
    """Raise `ConfigError` unless ranks have whole key/value heads, or whole heads have several ranks."""
    kv_heads, heads = model.kv_heads, model.heads

    def is_legal(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not is_legal(size):
        raise ConfigError(
            f"{knob}={size} is neither a divisor nor a multiple of the model's key/value heads ({kv_heads}); nearest "
            f"legal: {nearest(size, is_legal, heads)}"
        )


def balanced_split(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as equal as can be, larger stages first: 7 over 2 is [4, 3]."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


# ---- the trainer -----------------------------------------------------------------------------------------------------


def check_parallel(model: Mapping[str, Any], trainer: TrainerConfig) -> None:
    """Raise `ConfigError` when `model` (a Hugging Face config.json) cannot be cut as `trainer` asks."""
    shape, tp = describe(model), trainer.tensor_parallel
    check_train(shape, TrainParallel.of(trainer))
    heads = f"attention heads per tensor rank (TP={tp})"
    divides("trainer.context_parallel", trainer.context_parallel, heads, shape.heads // tp)
    if trainer.sequence_parallel and tp == 1:
        raise ConfigError("trainer.sequence_parallel needs trainer.tensor_parallel >= 2; set it to false")
    if shape.experts is not None and tp > 1 and not trainer.sequence_parallel:
        raise ConfigError("a mixture-of-experts model with trainer.tensor_parallel > 1 needs sequence_parallel: true")


def check_train(model: ModelShape, parallel: TrainParallel) -> None:
    """Raise `ConfigError` when megatron could not cut `model` like this."""
    knob, tp = "trainer.tensor_parallel", parallel.tensor
    divides(knob, tp, "attention heads", model.heads)
    if model.latent is None:
        serves_kv_heads(knob, tp, model)
    elif parallel.split_latent_down:
        divides(knob, tp, "q_lora_rank", model.latent.q_rank)
        divides(knob, tp, "kv_lora_rank + qk_rope_head_dim", model.latent.kv_rank + model.latent.rope)
    if model.experts is None or model.experts.dense_layers:
        divides(knob, tp, "feed-forward width", model.ffn)
    if parallel.vocab_multiple is not None and parallel.vocab_multiple % tp:
        raise ConfigError(
            f"a vocabulary padded to a multiple of {parallel.vocab_multiple} cannot be cut by {knob}={tp}"
        )
    stage_layers(model, parallel)
    _check_experts(model, parallel)


def stage_layers(model: ModelShape, parallel: TrainParallel) -> list[range]:
    """Global layer numbers of each stage in model order. Raises `ConfigError` for a split that misses a layer."""
    layers, pp, virtual = model.layers, parallel.pipeline, parallel.virtual
    if virtual > 1 and pp == 1:
        raise ConfigError("trainer.virtual_pipeline needs trainer.pipeline_parallel >= 2; leave it out")
    stages = pp * virtual
    if parallel.pipeline_layers is not None:
        counts = list(parallel.pipeline_layers)
        _check_pipeline_layers(layers, parallel, counts)
    else:
        uneven = ""
        if layers >= stages:
            uneven = f", or uneven stages: trainer.pipeline_layers={balanced_split(layers, stages)}"
        divides("trainer.pipeline_parallel", pp, "layers", layers, uneven)
        divides("trainer.virtual_pipeline", virtual, f"layers per pipeline rank (PP={pp})", layers // pp, uneven)
        counts = [layers // stages] * stages
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts)]


def _check_pipeline_layers(layers: int, parallel: TrainParallel, counts: list[int]) -> None:
    if parallel.pipeline == 1:
        raise ConfigError("trainer.pipeline_layers needs trainer.pipeline_parallel >= 2; leave it out")
    stages = parallel.pipeline * parallel.virtual
    if len(counts) == stages and sum(counts) == layers and min(counts) >= 1:
        return
    made_of = f"pipeline_parallel={parallel.pipeline}"
    if parallel.virtual > 1:
        made_of += f" x virtual_pipeline={parallel.virtual}"
    legal = f"; balanced: {balanced_split(layers, stages)}" if layers >= stages else ""
    raise ConfigError(
        f"trainer.pipeline_layers={counts} must name {stages} stages ({made_of}) of at least one layer each, "
        f"{layers} layers in all{legal}"
    )


def _check_experts(model: ModelShape, parallel: TrainParallel) -> None:
    experts, knob, ep = model.experts, "trainer.expert_parallel", parallel.expert
    if experts is None:
        if ep > 1:
            raise ConfigError(f"{knob}={ep}, but the model has no experts; set it to 1")
        return
    wide = "trainer.tensor_parallel" if parallel.expert_tensor is None else "expert tensor parallel"
    divides(wide, parallel.experts_tensor, "expert width", experts.width)
    divides("trainer.tensor_parallel", parallel.tensor, "shared expert width", experts.shared_width)
    divides(knob, ep, "experts", experts.count)
    ranks, rest = divmod(parallel.stage_ranks, parallel.experts_tensor)
    if rest:
        raise ConfigError(
            f"expert tensor parallel={parallel.experts_tensor} does not divide the {parallel.stage_ranks} ranks of a "
            f"stage; nearest legal: {nearest(parallel.experts_tensor, lambda n: parallel.stage_ranks % n == 0, ranks)}"
        )
    if ranks % ep:
        legal = nearest(ep, lambda n: ranks % n == 0 and experts.count % n == 0, ranks)
        raise ConfigError(
            f"{knob}={ep} does not divide the {ranks} ranks of a pipeline stage out of which it is carved (tensor x "
            f"context x data / expert tensor); nearest legal: {legal}"
        )


# ---- rollout ---------------------------------------------------------------------------------------------------------


def check_rollout(model: ModelShape, parallel: RolloutParallel) -> None:
    """Raise `ConfigError` when vLLM could not cut `model` like this."""
    knob, tp, experts = "rollout.tensor_parallel", parallel.tensor, model.experts
    divides(knob, tp, "attention heads", model.heads)
    if model.latent is None:
        serves_kv_heads(knob, tp, model)
    if experts is None or experts.dense_layers:
        divides(knob, tp, "feed-forward width", model.ffn)
    if experts is None:
        if parallel.expert:
            raise ConfigError("rollout deals out experts, but the model has none; switch expert parallel off")
        return
    ranks = tp * parallel.data
    divides(knob, tp, "shared expert width", experts.shared_width)
    if not parallel.expert:
        divides("rollout tensor x data parallel", ranks, "expert width", experts.width)
    elif ranks > experts.count:
        legal = nearest(ranks, lambda n: n % tp == 0, experts.count)
        raise ConfigError(
            f"rollout tensor x data parallel={ranks} is more than the {experts.count} experts; nearest legal: {legal}"
        )
