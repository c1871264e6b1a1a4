"""Device memory of a configuration by kind of use, in bytes of the fullest device. Pure.

Activations follow Korthikanti et al., arXiv 2205.05198, counted for the layers that there are: what every matrix, norm
and non-linearity keeps of a token; attention keeps no score matrix. A pipeline rank holds as many micro-batches as
there are stages behind it, itself included (one forward, one backward).
"""

from __future__ import annotations

from mindspeed_asyncflow.config.mindspeed import master_bytes
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.planner.analytic import WIDTH
from mindspeed_asyncflow.planner.work import Work

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUCKET = "weights", "gradients", "optimizer", "activations", "relay bucket"
CACHE = "kv cache"
MIB = 1 << 20

_WIDENED = 1 << 25  # logits that platforms/vocabulary_torch.py widens at once on a device


def usable_bytes(config: Config) -> float:
    """What a device has for us."""
    cluster = config.cluster
    return cluster.device.memory_gb * 1e9 * (1 - cluster.memory_reserve)


def trainer_bytes(config: Config, work: Work) -> dict[str, float]:
    """By kind, of the rank of the trainer that has most."""
    return max((_rank_bytes(config, work, rank) for rank in _ends(config)), key=lambda kinds: sum(kinds.values()))


def _ends(config: Config) -> tuple[int, ...]:
    """The first rank holds most micro-batches and the embedding, the last one the head and the logits."""
    last = config.trainer.pipeline_parallel - 1
    return (0, last) if last else (0,)


def _rank_bytes(config: Config, work: Work, rank: int) -> dict[str, float]:
    t, width = config.trainer, WIDTH[config.model.dtype]
    layers = rank_layers(config, work, rank)
    last = rank == t.pipeline_parallel - 1
    dense: float = sum(work.layer_dense[layer] for layer in layers)
    dense += work.vocabulary * ((rank == 0) + (last and not (rank == 0 and work.shape.tied)))
    experts = sum(work.layer_experts[layer] for layer in layers) / t.expert_parallel
    local = (dense + experts) / t.tensor_parallel
    # Optimizer state is cut over the ranks that hold the same weights: of an expert, one in EP ranks.
    ranks = t.data_parallel * t.context_parallel if t.distributed_optimizer else 1
    cut = (dense / ranks + experts / max(1, ranks // t.expert_parallel)) / t.tensor_parallel
    return {
        WEIGHTS: local * width,
        GRADIENTS: local * 4,
        OPTIMIZER: cut * (8 + master_bytes(config)),
        ACTIVATIONS: _activations(config, work, rank, len(layers)),
        BUCKET: bucket_bytes(local * width),
    }


def rank_layers(config: Config, work: Work, rank: int) -> list[int]:
    """Numbers of the layers of a pipeline rank."""
    t = config.trainer
    stages = t.pipeline_parallel * (t.virtual_pipeline or 1)
    counts = t.pipeline_layers or [work.shape.layers // stages] * stages
    starts = [sum(counts[:stage]) for stage in range(stages)]
    mine = range(rank, stages, t.pipeline_parallel)
    return [layer for stage in mine for layer in range(starts[stage], starts[stage] + counts[stage])]


def _activations(config: Config, work: Work, rank: int, layers: int) -> float:
    t, width, shape = config.trainer, WIDTH[config.model.dtype], work.shape
    tokens = t.micro_batch_tokens / t.context_parallel
    whole = 3 * shape.hidden  # two norms and the residual stay whole on each tensor rank without sequence parallelism
    cut = work.layer_activations - whole
    tensor = t.tensor_parallel
    layer = (work.layer_activations / tensor if t.sequence_parallel else whole + cut / tensor) * width
    kept = shape.hidden * width / (tensor if t.sequence_parallel else 1)  # a recomputed layer keeps its input
    ahead: float = t.pipeline_parallel - rank  # micro-batches under way
    if t.virtual_pipeline:
        ahead += (t.pipeline_parallel - 1) * (t.virtual_pipeline - 1) / t.virtual_pipeline
    held: float = tokens * layers * ahead * (kept if t.recompute else layer)
    if t.recompute:
        held += tokens * layer
    if rank == t.pipeline_parallel - 1:  # logits and their gradient, and the part of them that is float32 at a time
        logits = tokens * shape.vocab / tensor
        held += logits * 2 * width + min(logits, _WIDENED) * 2 * 4
    return held


def bucket_bytes(local_bytes: float) -> float:
    """Staging between a device and the relay: an eighth of what the rank has, 16 to 512 MiB. Larger ones hide no more
    of the copy behind the transfer, smaller ones pay latency."""
    return min(local_bytes, max(16 * MIB, min(512 * MIB, local_bytes / 8)))


def rollout_bytes(config: Config, work: Work) -> dict[str, float]:
    """By kind, of one device of a replica; `kv cache` is what `rollout.kv_cache_mb` asks for."""
    r, width, shape = config.rollout, WIDTH[config.model.dtype], work.shape
    weights = work.parameters * width / r.tensor_parallel
    prefill = config.data.max_prompt_tokens * min(r.max_running, 8)  # of one prefill batch
    return {
        WEIGHTS: weights,
        CACHE: r.kv_cache_mb * MIB / work.cache_cut(r.tensor_parallel),
        ACTIVATIONS: prefill * work.layer_activations * width / r.tensor_parallel
        + r.max_running * shape.vocab * 4 / r.tensor_parallel,
        BUCKET: bucket_bytes(weights),
    }


def cache_bytes_per_token(config: Config, work: Work) -> float:
    """Of a whole replica, as `rollout.kv_cache_mb` counts it: what several tensor ranks hold alike counts once."""
    return work.cached * WIDTH[config.model.dtype]
