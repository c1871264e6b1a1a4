"""Full tensors of the small models, and what every rollout rank should hold of them, by plain chunks."""

from functools import cache

import torch

from mindspeed_asyncflow.config.parallel import RolloutParallel
from mindspeed_asyncflow.reshard.layout import Layout
from tests.reshard.matrix import CONFIGS, MODELS, Case


@cache
def full_tensors(model: str) -> dict[str, torch.Tensor]:
    """Random float32 weights under their Hugging Face names."""
    generator = torch.Generator().manual_seed(list(CONFIGS).index(model))
    return {t.name: torch.randn(t.shape, generator=generator) for t in MODELS[model].tensors().values()}


def cut(model: str, layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """What the layout says that `rank` holds, float32; padding is zero."""
    found = {}
    for param in layout.ranks[rank]:
        tensor = torch.zeros(param.shape)
        matrix = tensor.view(param.shape[0], -1)
        for name, box, row, col in ((s.name, s.box, s.row, s.col) for s in param.segments):
            full = full_tensors(model)[name]
            full = full.view(full.shape[0], -1)
            matrix[row : row + box.rows, col : col + box.cols] = full[box.r0 : box.r1, box.c0 : box.c1]
        found[param.name] = tensor
    return found


def rollout_shards(case: Case, rank: int) -> dict[str, torch.Tensor]:
    """The float32 slices of rollout rank `rank`: what vLLM's loaders cut out of the full tensors."""
    p: RolloutParallel = case.rollout
    tp, inside = rank % p.tensor, rank % (p.tensor * p.data)
    size, model = p.tensor * p.data, MODELS[case.model]
    found = {}
    for name, full in full_tensors(case.model).items():
        short = name.split(".", 3)[-1]
        routed = ".mlp.experts." in name
        parts, index = p.tensor, tp
        if routed and p.expert:
            assert model.experts is not None
            mine = torch.arange(model.experts.count).tensor_split(size)[inside]
            if int(name.split(".")[5]) in mine:
                found[name] = full
            continue
        if routed:
            parts, index = size, inside
        if short.endswith(("o_proj.weight", "down_proj.weight")):
            part = full.tensor_split(parts, dim=1)[index]
        elif "k_proj." in short or "v_proj." in short:
            heads = full.reshape(model.kv_heads, model.head_dim, -1)
            repeated = heads.repeat_interleave(max(1, p.tensor // model.kv_heads), dim=0)
            part = repeated.tensor_split(p.tensor)[tp].reshape(-1, *full.shape[1:])
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            padded = torch.zeros(-(-full.shape[0] // 64) * 64, full.shape[1])
            padded[: full.shape[0]] = full
            rows = padded.shape[0] // p.tensor
            part = padded[tp * rows : (tp + 1) * rows][: max(0, full.shape[0] - tp * rows)]
        elif short.endswith(
            (
                "q_proj.weight",
                "q_proj.bias",
                "q_b_proj.weight",
                "kv_b_proj.weight",
                "gate_proj.weight",
                "up_proj.weight",
            )
        ):
            part = full.tensor_split(parts)[index]
        else:
            part = full
        if part.numel():
            found[name] = part.contiguous()
    return found
