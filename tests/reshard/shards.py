"""What every trainer rank should hold, made without the layout code: mbridge's converters and megatron's
rank numbering."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.parallel_state import RankGenerator

from mindspeed_asyncflow.config.parallel import TrainParallel
from tests.reshard.matrix import CONFIGS, MODELS, Case
from tests.reshard.slices import full_tensors

_BRIDGES = {
    "qwen2": Qwen2Bridge,
    "qwen3": Qwen3Bridge,
    "qwen3_moe": Qwen3MoEBridge,
    "deepseek_v3": DeepseekV3Bridge,
}
_TE_NAMES = {  # mbridge knows the norms under the names of the Transformer Engine spec, where they are fused
    "decoder.input": {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"},
    "latent": {
        "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    },
    "dense": {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"},
}


@cache
def _bridge(model: str, padded_vocab: int, dense_layer: bool = False) -> Any:
    """`dense_layer`: for the ordinary feed-forward of a layer, which mbridge's Qwen3-MoE class does not know."""
    config = CONFIGS[model]
    kind = Qwen3Bridge if dense_layer and config["model_type"] == "qwen3_moe" else _BRIDGES[config["model_type"]]
    bridge = object.__new__(kind)  # its constructor wants a whole configuration and process groups
    bridge.hf_config = SimpleNamespace(**config)
    bridge.config = SimpleNamespace(gated_linear_unit=True)
    bridge.dtype = torch.float32
    bridge.make_vocab_size_divisible_by = 1
    bridge.vocab_size, bridge.padded_vocab_size = config["vocab_size"], padded_vocab
    if config.get("tie_word_embeddings"):
        bridge._DIRECT_MAPPING = kind._DIRECT_MAPPING | {"output_layer.weight": "model.embed_tokens.weight"}
    return bridge


def _mbridge_name(model: str, name: str) -> str:
    kind = CONFIGS[model]["model_type"]
    tables = [_TE_NAMES["latent"]] if kind == "deepseek_v3" else [_TE_NAMES["decoder.input"]]
    if kind in ("qwen2", "qwen3"):
        tables.append(_TE_NAMES["dense"])
    for table in tables:
        for ours, theirs in table.items():
            if name.endswith("." + ours):
                return name.removesuffix(ours) + theirs
    return name


@cache
def _full_megatron(model: str, name: str, padded_vocab: int) -> torch.Tensor:
    bridge, known = _bridge(model, padded_vocab, ".mlp.linear_fc" in name), _mbridge_name(model, name)
    return bridge._weight_to_mcore_format(
        known, [full_tensors(model)[n] for n in bridge._weight_name_mapping_mcore_to_hf(known)]
    )


def coordinates(parallel: TrainParallel, rank: int) -> dict[str, int]:
    """tp, pp, ep and etp number of a global rank, by megatron's own generators."""
    p = parallel
    dense = RankGenerator(tp=p.tensor, ep=1, dp=p.data, pp=p.pipeline, cp=p.context, order="tp-cp-ep-dp-pp")
    expert_data = p.world_size // (p.experts_tensor * p.expert * p.pipeline)
    sparse = RankGenerator(
        tp=p.experts_tensor, ep=p.expert, dp=expert_data, pp=p.pipeline, cp=1, order="tp-cp-ep-dp-pp"
    )

    def number(generator: Any, token: str) -> int:
        return next(group.index(rank) for group in generator.get_ranks(token) if rank in group)

    found = {"tp": number(dense, "tp"), "pp": number(dense, "pp")}
    return found | {"etp": number(sparse, "tp"), "ep": number(sparse, "ep")}


def trainer_shards(case: Case, rank: int, params: Any) -> dict[str, torch.Tensor]:
    """The float32 shards of `rank`: mbridge merges and splits the Hugging Face tensors, for the names of `params`.

    Padding rows of the vocabulary are zero.
    """
    p, shards = case.train, {}
    where = coordinates(p, rank)
    multiple = p.vocab_multiple or p.tensor
    padded = -(-MODELS[case.model].vocab // multiple) * multiple
    for param in params:
        routed = ".mlp.experts." in param.name
        index, size = (where["etp"], p.experts_tensor) if routed else (where["tp"], p.tensor)
        full = _full_megatron(case.model, param.name, padded)
        parts = _bridge(case.model, padded)._weight_split_across_tp(
            _mbridge_name(case.model, param.name), full, torch.empty(param.shape, device="meta"), size
        )
        shards[param.name] = parts[index].contiguous()
    return shards


def expected_names(case: Case, rank: int) -> set[str]:
    """Layers and experts that `rank` must have, as (layer, expert) prefixes of megatron's names."""
    p, model = case.train, MODELS[case.model]
    where = coordinates(p, rank)
    stages = p.pipeline * p.virtual
    counts = p.pipeline_layers or [model.layers // stages] * stages
    names, first = set(), 0
    for stage, count in enumerate(counts):
        if stage % p.pipeline == where["pp"]:
            for layer in range(first, first + count):
                names.add(f"decoder.layers.{layer}.input_layernorm.weight")
                if model.is_moe(layer) and model.experts is not None:
                    each = model.experts.count // p.expert
                    names |= {
                        f"decoder.layers.{layer}.mlp.experts.linear_fc2.weight{e}"
                        for e in range(where["ep"] * each, where["ep"] * each + each)
                    }
        first += count
    return names
