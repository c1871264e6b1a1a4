"""Whether a model can be cut as trainer or rollout want it: pure arithmetic on the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from mindspeed_asyncflow.config.model import Experts, ModelShape, describe
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

    def __post_init__(self) -> None:
        _require_positive(self)

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

    def __post_init__(self) -> None:
        _require_positive(self)

    @property
    def world_size(self) -> int:
        return self.tensor * self.data * self.replicas

    def __str__(self) -> str:
        text = f"TP{self.tensor} DP{self.data}" + (f" EP{self.tensor * self.data}" if self.expert else "")
        return f"{self.replicas} x {text}" if self.replicas > 1 else text


# ---- refusals that name the setting, the reason and the nearest legal sizes ------------------------------------------

KNOBS = {  # settings behind the fields; a field without one has its own name
    "tensor": "tensor_parallel",
    "pipeline": "pipeline_parallel",
    "virtual": "virtual_pipeline",
    "expert": "expert_parallel",
}


class _Problem(NamedTuple):
    """Why one size cannot be."""

    field: str
    reason: str
    largest: int  # no larger size could be legal
    otherwise: str = ""  # what else would do


Problems = Callable[[Any], Iterator[_Problem]]


def _refuse(side: str, parallel: Any, problems: Problems) -> None:
    """Raise `ConfigError` for the first problem. A size is legal when no rule at all speaks against it."""
    problem = next(problems(parallel), None)
    if problem is None:
        return
    field, size = problem.field, getattr(parallel, problem.field)

    def is_legal(n: int) -> bool:
        return all(p.field != field for p in problems(replace(parallel, **{field: n})))

    legal = nearest(1 if size is None else size, is_legal, problem.largest)
    knob = f"{side}.{KNOBS.get(field, field)}"
    raise ConfigError(f"{knob}={size} {problem.reason}; nearest legal: {legal}{problem.otherwise}")


def _require_positive(parallel: Any) -> None:
    for part in fields(parallel):
        value = getattr(parallel, part.name)
        if part.type in ("int", "int | None") and value is not None and value < 1:
            raise ConfigError(f"{type(parallel).__name__}.{part.name}={value}: sizes are whole numbers from 1")


def nearest(wanted: int, is_legal: Callable[[int], bool], largest: int) -> str:
    """The legal sizes closest to `wanted` from below and from above, as text; sizes up to `largest` are tried."""
    below = next((n for n in range(min(wanted, largest), 0, -1) if is_legal(n)), None)
    above = next((n for n in range(wanted + 1, largest + 1) if is_legal(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None) or "none"


def balanced_split(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as equal as can be, larger stages first: 7 over 2 is [4, 3]."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def _undivided(what: str, number: int) -> str:
    return f"does not divide the model's {what} ({number})"


def _attention_problems(model: ModelShape, tp: int) -> Iterator[_Problem]:
    """Rules that trainer and rollout share."""
    if model.heads % tp:
        yield _Problem("tensor", _undivided("attention heads", model.heads), model.heads)
    if model.latent is None and model.kv_heads % tp and tp % model.kv_heads:
        reason = f"is neither a divisor nor a multiple of the model's key/value heads ({model.kv_heads})"
        yield _Problem("tensor", reason, model.heads)
    if (model.experts is None or model.experts.dense_layers) and model.ffn % tp:
        yield _Problem("tensor", _undivided("feed-forward width", model.ffn), model.heads)
    if model.experts is not None and model.experts.shared_width % tp:
        yield _Problem("tensor", _undivided("shared expert width", model.experts.shared_width), model.heads)


# ---- the trainer -----------------------------------------------------------------------------------------------------


def check_parallel(model: Mapping[str, Any], trainer: TrainerConfig) -> None:
    """Raise `ConfigError` when `model` (a Hugging Face config.json) cannot be cut as `trainer` asks."""
    shape, tp, cp = describe(model), trainer.tensor_parallel, trainer.context_parallel
    check_train(shape, TrainParallel.of(trainer))
    heads = shape.heads // tp
    if heads % cp and trainer.mindspeed.context_parallel == "ulysses":
        raise ConfigError(
            f"trainer.context_parallel={cp} {_undivided(f'attention heads per tensor rank (TP={tp})', heads)}; nearest "
            f"legal: {nearest(cp, lambda n: heads % n == 0, heads)}; trainer.mindspeed.context_parallel: ring takes any"
        )
    if trainer.sequence_parallel and tp == 1:
        raise ConfigError("trainer.sequence_parallel needs trainer.tensor_parallel >= 2; set it to false")
    if shape.experts is not None and tp > 1 and not trainer.sequence_parallel:
        raise ConfigError("a mixture-of-experts model with trainer.tensor_parallel > 1 needs sequence_parallel: true")


def check_train(model: ModelShape, parallel: TrainParallel) -> None:
    """Raise `ConfigError` when megatron could not cut `model` like this."""
    _refuse("trainer", parallel, lambda sizes: _train_problems(model, sizes))
    if parallel.virtual > 1 and parallel.pipeline == 1:
        raise ConfigError("trainer.virtual_pipeline needs trainer.pipeline_parallel >= 2; leave it out")
    if parallel.pipeline_layers is not None:
        _check_pipeline_layers(model.layers, parallel, list(parallel.pipeline_layers))
    if model.experts is None and parallel.expert > 1:
        raise ConfigError(f"trainer.expert_parallel={parallel.expert}, but the model has no experts; set it to 1")


def _train_problems(model: ModelShape, parallel: TrainParallel) -> Iterator[_Problem]:
    tp = parallel.tensor
    yield from _attention_problems(model, tp)
    fused = (model.heads + 2 * model.kv_heads) * model.head_dim
    if model.latent is None and fused % tp:
        yield _Problem("tensor", _undivided("rows of fused queries, keys and values", fused), model.heads)
    if model.latent is not None and parallel.split_latent_down:
        rows = model.latent.kv_rank + model.latent.rope
        for what, number in (("q_lora_rank", model.latent.q_rank), ("kv_lora_rank + qk_rope_head_dim", rows)):
            if number % tp:
                yield _Problem("tensor", _undivided(what, number), model.heads)
    if parallel.vocab_multiple is not None and parallel.vocab_multiple % tp:
        reason = f"does not divide {parallel.vocab_multiple}, of which the vocabulary is a multiple"
        yield _Problem("tensor", reason, model.heads)
    if parallel.pipeline_layers is None:
        yield from _pipeline_problems(model.layers, parallel)
    if model.experts is not None:
        yield from _expert_problems(model.experts, parallel)


def _pipeline_problems(layers: int, parallel: TrainParallel) -> Iterator[_Problem]:
    pp, virtual = parallel.pipeline, parallel.virtual
    uneven = ""
    if layers >= pp * virtual:
        uneven = f", or uneven stages: trainer.pipeline_layers={balanced_split(layers, pp * virtual)}"
    if layers % pp:
        yield _Problem("pipeline", _undivided("layers", layers), layers, uneven)
    elif layers // pp % virtual:
        what = f"layers per pipeline rank (PP={pp})"
        yield _Problem("virtual", _undivided(what, layers // pp), layers // pp, uneven)


def _expert_problems(experts: Experts, parallel: TrainParallel) -> Iterator[_Problem]:
    wide, etp, ep = "tensor", parallel.experts_tensor, parallel.expert
    if parallel.expert_tensor is not None:
        wide = "expert_tensor"
    if experts.width % etp:
        yield _Problem(wide, _undivided("expert width", experts.width), experts.width)
    ranks, rest = divmod(parallel.stage_ranks, etp)
    if rest:
        yield _Problem(wide, f"does not divide the {parallel.stage_ranks} ranks of a pipeline stage", experts.width)
    if experts.count % ep:
        yield _Problem("expert", _undivided("experts", experts.count), experts.count)
    elif ranks % ep:
        reason = (
            f"does not divide the {ranks} ranks of a pipeline stage out of which it is carved (tensor x context x data "
            "/ expert tensor)"
        )
        yield _Problem("expert", reason, experts.count)


def stage_layers(model: ModelShape, parallel: TrainParallel) -> list[range]:
    """Global layer numbers of each stage in model order, for sizes that `check_train` has passed."""
    stages = parallel.pipeline * parallel.virtual
    counts = parallel.pipeline_layers or [model.layers // stages] * stages
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


# ---- rollout ---------------------------------------------------------------------------------------------------------


def check_rollout(model: ModelShape, parallel: RolloutParallel) -> None:
    """Raise `ConfigError` when vLLM could not cut `model` like this."""
    if model.experts is None and parallel.expert:
        raise ConfigError("rollout deals out experts, but the model has none; switch expert parallel off")
    _refuse("rollout", parallel, lambda sizes: _rollout_problems(model, sizes))


def _rollout_problems(model: ModelShape, parallel: RolloutParallel) -> Iterator[_Problem]:
    yield from _attention_problems(model, parallel.tensor)
    if model.experts is None:
        return
    ranks, width, count = parallel.tensor * parallel.data, model.experts.width, model.experts.count
    if not parallel.expert and width % ranks:
        yield _Problem("data", f"x tensor parallel={parallel.tensor} {_undivided('expert width', width)}", width)
    elif parallel.expert and ranks > count:
        yield _Problem("data", f"x tensor parallel={parallel.tensor} is more than the {count} experts", count)
