"""Where vLLM wants which slice, in Hugging Face names: tensor, data and expert parallel replicas. Pure.

Rules, as vLLM 0.27.1 has them (linear.py, vocab_parallel_embedding.py, fused_moe/config.py and expert_map_manager.py):
- heads, feed-forward widths and vocabulary rows are cut evenly; the vocabulary is first padded to a multiple of 64;
- key/value heads fewer than tensor ranks are repeated over neighbouring ranks;
- norms, routers and the down projections of latent attention are on every rank;
- routed experts: with `expert`, whole experts over all tensor x data ranks of a replica in blocks (the first ranks get
  one more when it does not come out even); without, the width of every expert is cut over those ranks.
"""

from __future__ import annotations

from mindspeed_asyncflow.config.model import EMBEDDING, HEAD, FullTensor, ModelShape
from mindspeed_asyncflow.config.parallel import RolloutParallel, check_rollout
from mindspeed_asyncflow.reshard.boxes import Box, whole
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment

VOCAB_MULTIPLE = 64

_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
_BY_ROWS = ("q_proj.weight", "q_proj.bias", "q_b_proj.weight", "kv_b_proj.weight", "gate_proj.weight", "up_proj.weight")
_KEY_VALUE = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")


def rollout_layout(model: ModelShape, parallel: RolloutParallel) -> Layout:
    """The layout of all rollout ranks. Raises `ConfigError` for sizes that vLLM could not serve."""
    check_rollout(model, parallel)
    tensors = model.tensors()
    dense = [
        {t.name: _dense_param(model, t, tp, parallel.tensor) for t in tensors.values() if t.expert < 0}
        for tp in range(parallel.tensor)
    ]
    replica: list[tuple[LocalParam, ...]] = []
    for data in range(parallel.data):
        for tp in range(parallel.tensor):
            if model.experts is None and data > 0:
                replica.append(replica[tp])
                continue
            index = data * parallel.tensor + tp
            params = [
                dense[tp][t.name] if t.expert < 0 else _expert_param(model, t, index, parallel)
                for t in tensors.values()
            ]
            replica.append(tuple(p for p in params if p is not None))
    layout = Layout(tensors, tuple(replica * parallel.replicas), label=str(parallel))
    layout.check_coverage()
    return layout


def _slice(tensor: FullTensor, box: Box) -> LocalParam | None:
    if not box.size:
        return None
    shape = (box.rows, box.cols) if len(tensor.shape) > 1 else (box.rows,)
    return LocalParam(tensor.name, shape, (Segment(tensor.name, box),))


def _dense_param(model: ModelShape, tensor: FullTensor, rank: int, size: int) -> LocalParam | None:
    box, name = whole(tensor.shape), tensor.name
    if name in (EMBEDDING, HEAD):
        padded = -(-model.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        share = -(-padded // size)
        box = box._replace(r0=min(rank * share, model.vocab), r1=min((rank + 1) * share, model.vocab))
    elif name.endswith(_KEY_VALUE):
        heads = max(1, model.kv_heads // size)
        first = rank * model.kv_heads // size
        box = box._replace(r0=first * model.head_dim, r1=(first + heads) * model.head_dim)
    elif name.endswith(_BY_COLUMNS):
        box = _cut(box, rank, size, by_rows=False)
    elif name.endswith(_BY_ROWS):
        box = _cut(box, rank, size, by_rows=True)
    return _slice(tensor, box)


def _expert_param(model: ModelShape, tensor: FullTensor, rank: int, parallel: RolloutParallel) -> LocalParam | None:
    assert model.experts is not None
    size = parallel.tensor * parallel.data
    if not parallel.expert:
        return _slice(tensor, _cut(whole(tensor.shape), rank, size, not tensor.name.endswith(_BY_COLUMNS)))
    base, more = divmod(model.experts.count, size)
    first = rank * base + min(rank, more)
    mine = first <= tensor.expert < first + base + (rank < more)
    return _slice(tensor, whole(tensor.shape)) if mine else None


def _cut(box: Box, rank: int, size: int, by_rows: bool) -> Box:
    if by_rows:
        share = box.rows // size
        return box._replace(r0=rank * share, r1=(rank + 1) * share)
    share = box.cols // size
    return box._replace(c0=rank * share, c1=(rank + 1) * share)
