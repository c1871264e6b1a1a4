"""Where megatron-core keeps which slice: TP, PP (uneven, virtual), EP, expert TP, CP, DP. Pure.

Rank order is megatron's (`tp-cp-ep-dp-pp`): inside a pipeline stage, ranks count tensor fastest, then context, then
data; for experts the same ranks count expert-tensor fastest, then expert, then expert-data. The distributed optimizer
shards optimizer state, not weights, so it does not appear here.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_asyncflow.config.model import EMBEDDING, FINAL_NORM, HEAD, ModelShape
from mindspeed_asyncflow.config.parallel import TrainParallel, check_train, stage_layers
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment


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
    layout = Layout(builder.tensors, tuple(ranks), label=str(parallel))
    layout.check_coverage()
    return layout


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
