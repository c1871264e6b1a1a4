"""Where megatron-core keeps which slice: TP, PP (uneven, virtual), EP, expert TP, CP, DP. Pure.

Rank order is megatron's (`tp-cp-ep-dp-pp`): inside a pipeline stage, ranks count tensor fastest, then context, then
data; for experts the same ranks count expert-tensor fastest, then expert, then expert-data. The distributed optimizer
shards optimizer state, not weights, so it does not appear here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment
from mindspeed_asyncflow.reshard.legal import divides, nearest, serves_kv_heads
from mindspeed_asyncflow.reshard.model import EMBEDDING, FINAL_NORM, HEAD, ModelShape


@dataclass(frozen=True, slots=True)
class TrainParallel:
    """Sizes of the trainer."""

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

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

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
        text = " ".join(f"{name}{size}" for name, size in sizes if size > 1)
        return text + (f" ETP{self.expert_tensor}" if self.expert_tensor is not None else "") or "1 rank"


def balanced(layers: int, stages: int) -> list[int]:
    """Layers per stage when the first stages take one more."""
    base, more = divmod(layers, stages)
    return [base + (stage < more) for stage in range(stages)]


def stage_layers(model: ModelShape, parallel: TrainParallel) -> list[range]:
    """Global layer numbers of each stage in model order. Raises `ConfigError` for a split that misses a layer."""
    stages = parallel.pipeline * parallel.virtual
    counts = list(parallel.pipeline_layers or ())
    if not counts:
        if model.layers % stages:
            knob = "pipeline parallel" if parallel.virtual == 1 else "pipeline x virtual stages"
            legal = nearest(stages, lambda n: model.layers % n == 0, model.layers)
            raise ConfigError(
                f"{knob}={stages} does not divide the {model.layers} layers; nearest legal: {legal}, or give "
                f"pipeline_layers, balanced: {balanced(model.layers, stages)}"
            )
        counts = [model.layers // stages] * stages
    if len(counts) != stages or sum(counts) != model.layers or min(counts) < 0:
        raise ConfigError(
            f"pipeline_layers={counts} must be {stages} counts that add up to {model.layers} layers; "
            f"balanced: {balanced(model.layers, stages)}"
        )
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts)]


def check_train(model: ModelShape, parallel: TrainParallel) -> None:
    """Raise `ConfigError` when megatron could not cut `model` like this."""
    tp = parallel.tensor
    divides("tensor parallel", tp, "the attention heads", model.heads)
    if model.latent is None:
        serves_kv_heads("tensor parallel", tp, model.kv_heads, model.heads)
    elif parallel.split_latent_down:
        for size in (model.latent.q_rank, model.latent.kv_rank + model.latent.rope):
            divides("tensor parallel", tp, "a latent down projection", size)
    if model.experts is None or model.experts.dense_layers:
        divides("tensor parallel", tp, "the feed-forward width", model.ffn)
    if parallel.vocab_multiple:
        divides("tensor parallel", tp, "vocab_multiple", parallel.vocab_multiple)
    if parallel.virtual > 1 and parallel.pipeline == 1:
        raise ConfigError("virtual stages need pipeline parallel >= 2")
    stage_layers(model, parallel)
    if model.experts is None:
        if parallel.expert > 1:
            raise ConfigError(f"expert parallel={parallel.expert}, but the model has no experts; set it to 1")
        return
    divides("expert tensor parallel", parallel.experts_tensor, "the width of an expert", model.experts.width)
    divides("expert parallel", parallel.expert, "the experts", model.experts.count)
    if model.experts.shared_width:
        divides("tensor parallel", tp, "the width of the shared experts", model.experts.shared_width)
    if parallel.stage_ranks % (parallel.expert * parallel.experts_tensor):
        per_etp = parallel.stage_ranks // parallel.experts_tensor or 1
        count = model.experts.count
        legal = nearest(parallel.expert, lambda n: per_etp % n == 0 and count % n == 0, per_etp)
        raise ConfigError(
            f"expert parallel={parallel.expert} x expert tensor parallel={parallel.experts_tensor} does not divide the "
            f"{parallel.stage_ranks} ranks of a pipeline stage (tensor x context x data); nearest legal: {legal}"
        )


def train_layout(model: ModelShape, parallel: TrainParallel) -> Layout:
    """The layout of all trainer ranks. Raises `ConfigError` for sizes that megatron could not train."""
    check_train(model, parallel)
    builder = _Builder(model, parallel)
    ranks: list[tuple[LocalParam, ...]] = []
    for pipeline in range(parallel.pipeline):
        made: dict[tuple[int, int, int], tuple[LocalParam, ...]] = {}  # replicas share one tuple
        for inside in range(parallel.stage_ranks):
            where = (inside % parallel.tensor, 0, 0)
            if model.experts is not None:
                where = (
                    where[0],
                    inside % parallel.experts_tensor,
                    inside // parallel.experts_tensor % parallel.expert,
                )
            if where not in made:
                made[where] = tuple(builder.rank(pipeline, *where))
            ranks.append(made[where])
    return Layout(builder.tensors, tuple(ranks), label=str(parallel))


class _Builder:
    def __init__(self, model: ModelShape, parallel: TrainParallel) -> None:
        self.model, self.parallel = model, parallel
        self.tensors = model.tensors()
        self.stages = stage_layers(model, parallel)
        multiple = parallel.vocab_multiple or parallel.tensor
        self.padded_vocab = -(-model.vocab // multiple) * multiple

    def rank(self, pipeline: int, tp: int, etp: int, ep: int) -> Iterator[LocalParam]:
        last = len(self.stages) - 1
        for chunk in range(self.parallel.virtual):
            stage = chunk * self.parallel.pipeline + pipeline
            if stage == 0:
                yield self._vocabulary("embedding.word_embeddings.weight", EMBEDDING, tp)
            for layer in self.stages[stage]:
                yield from self._layer(layer, tp, etp, ep)
            if stage == last:
                yield self._copy("decoder.final_layernorm.weight", FINAL_NORM)
                if not self.model.tied:
                    yield self._vocabulary("output_layer.weight", HEAD, tp)
                elif stage > 0:  # the last stage keeps its own copy of a tied embedding
                    yield self._vocabulary("output_layer.weight", EMBEDDING, tp)

    def _layer(self, layer: int, tp: int, etp: int, ep: int) -> Iterator[LocalParam]:
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield self._copy(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight")
        if self.model.latent is None:
            yield from self._attention(f"{ours}self_attention.", f"{theirs}self_attn.", tp)
        else:
            yield from self._latent_attention(f"{ours}self_attention.", f"{theirs}self_attn.", tp)
        yield self._copy(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight")
        if not self.model.is_moe(layer):
            yield from self._feed_forward(f"{ours}mlp.", f"{theirs}mlp.", "", tp, self.parallel.tensor)
            return
        experts = self.model.experts
        assert experts is not None
        yield self._copy(f"{ours}mlp.router.weight", f"{theirs}mlp.gate.weight")
        if experts.bias:
            yield self._copy(f"{ours}mlp.router.expert_bias", f"{theirs}mlp.gate.e_score_correction_bias")
        share = experts.count // self.parallel.expert
        for number in range(ep * share, (ep + 1) * share):
            source = f"{theirs}mlp.experts.{number}."
            yield from self._feed_forward(f"{ours}mlp.experts.", source, str(number), etp, self.parallel.experts_tensor)
        if experts.shared_width:
            source = f"{theirs}mlp.shared_experts."
            yield from self._feed_forward(f"{ours}mlp.shared_experts.", source, "", tp, self.parallel.tensor)

    def _attention(self, ours: str, theirs: str, tp: int) -> Iterator[LocalParam]:
        yield self._fused_qkv(f"{ours}linear_qkv.weight", theirs, "weight", tp)
        if self.model.qkv_bias:
            yield self._fused_qkv(f"{ours}linear_qkv.bias", theirs, "bias", tp)
        if self.model.qk_norm:
            yield self._copy(f"{ours}q_layernorm.weight", f"{theirs}q_norm.weight")
            yield self._copy(f"{ours}k_layernorm.weight", f"{theirs}k_norm.weight")
        yield self._columns(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", tp, self.parallel.tensor)

    def _latent_attention(self, ours: str, theirs: str, tp: int) -> Iterator[LocalParam]:
        size = self.parallel.tensor
        down = size if self.parallel.split_latent_down else 1
        latent = self.model.latent
        assert latent is not None
        if latent.q_rank:
            yield self._rows(f"{ours}linear_q_down_proj.weight", f"{theirs}q_a_proj.weight", tp % down, down)
            yield self._copy(f"{ours}q_layernorm.weight", f"{theirs}q_a_layernorm.weight")
            yield self._rows(f"{ours}linear_q_up_proj.weight", f"{theirs}q_b_proj.weight", tp, size)
        else:
            yield self._rows(f"{ours}linear_q_proj.weight", f"{theirs}q_proj.weight", tp, size)
        yield self._rows(f"{ours}linear_kv_down_proj.weight", f"{theirs}kv_a_proj_with_mqa.weight", tp % down, down)
        yield self._copy(f"{ours}kv_layernorm.weight", f"{theirs}kv_a_layernorm.weight")
        yield self._rows(f"{ours}linear_kv_up_proj.weight", f"{theirs}kv_b_proj.weight", tp, size)
        yield self._columns(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", tp, size)

    def _feed_forward(self, ours: str, theirs: str, number: str, rank: int, size: int) -> Iterator[LocalParam]:
        """Gate rows above up rows in one parameter, each cut over the ranks; columns of the down projection."""
        gate = self._cut_rows(f"{theirs}gate_proj.weight", rank, size)
        up = self._cut_rows(f"{theirs}up_proj.weight", rank, size, at=gate.box.rows)
        shape = (gate.box.rows + up.box.rows, gate.box.cols)
        yield LocalParam(f"{ours}linear_fc1.weight{number}", shape, (gate, up))
        yield self._columns(f"{ours}linear_fc2.weight{number}", f"{theirs}down_proj.weight", rank, size)

    def _fused_qkv(self, name: str, theirs: str, kind: str, tp: int) -> LocalParam:
        """Rows of a key/value group follow each other: its queries, its key, its value. The fused matrix is cut evenly
        over the tensor ranks, also in the middle of a group when there are fewer key/value heads than ranks."""
        model = self.model
        queries = model.heads // model.kv_heads * model.head_dim  # rows per group
        group = queries + 2 * model.head_dim
        share = model.kv_heads * group // self.parallel.tensor
        start, stop = tp * share, (tp + 1) * share
        segments: list[Segment] = []
        for number in range(start // group, -(-stop // group)):
            at = number * group  # in the fused matrix
            for part, rows in (("q", queries), ("k", model.head_dim), ("v", model.head_dim)):
                first, last = max(at, start), min(at + rows, stop)
                if first < last:
                    full = self.tensors[f"{theirs}{part}_proj.{kind}"]
                    row = number * rows + first - at
                    box = Box(row, row + last - first, 0, matrix_shape(full.shape)[1])
                    segments.append(Segment(full.name, box, row=first - start))
                at += rows
        shape = (share, model.hidden) if kind == "weight" else (share,)
        return LocalParam(name, shape, tuple(segments))

    def _vocabulary(self, name: str, source: str, tp: int) -> LocalParam:
        share = self.padded_vocab // self.parallel.tensor
        start, stop = tp * share, min((tp + 1) * share, self.model.vocab)
        segments = (Segment(source, Box(start, stop, 0, self.model.hidden)),) if start < stop else ()
        return LocalParam(name, (share, self.model.hidden), segments)

    def _copy(self, name: str, source: str) -> LocalParam:
        return self._rows(name, source, 0, 1)

    def _rows(self, name: str, source: str, rank: int, size: int) -> LocalParam:
        full, segment = self.tensors[source], self._cut_rows(source, rank, size)
        return LocalParam(name, (segment.box.rows, *full.shape[1:]), (segment,))

    def _columns(self, name: str, source: str, rank: int, size: int) -> LocalParam:
        rows, cols = self.tensors[source].shape
        share = cols // size
        segment = Segment(source, Box(0, rows, rank * share, (rank + 1) * share))
        return LocalParam(name, (rows, share), (segment,))

    def _cut_rows(self, source: str, rank: int, size: int, at: int = 0) -> Segment:
        rows, cols = matrix_shape(self.tensors[source].shape)
        share = rows // size
        return Segment(source, Box(rank * share, (rank + 1) * share, 0, cols), row=at)
