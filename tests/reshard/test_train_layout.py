from types import SimpleNamespace

import pytest
import torch

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import TrainParallel
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.reshard.train_layout import train_layout
from tests.reshard.models import DEEPSEEK_R1, FAMILIES, QWEN2, QWEN2_FEW_KV, QWEN2_TIED, QWEN3_MOE

PREFIX = "model.layers.0."


def full_tensors(model):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(t.shape, generator=generator) for name, t in model.tensors().items()}


def build(param, tensors, padding=-1.0):
    """The local parameter that a layout describes."""
    local = torch.full(param.shape, padding)
    view = local.view(param.shape[0], -1)
    for segment in param.segments:
        full, box, place = tensors[segment.name], segment.box, segment.local
        part = full.view(full.shape[0], -1)[box.r0 : box.r1, box.c0 : box.c1]
        view[place.r0 : place.r1, place.c0 : place.c1] = part
    return local


def mbridge_shard(config, name, tensors, rank, size, shape, padded_vocab):
    """The same parameter as mbridge makes it out of Hugging Face tensors, without any of our code."""
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from mbridge.models.qwen3 import Qwen3Bridge
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    bridges = {"qwen2": Qwen2Bridge, "qwen3": Qwen3Bridge, "qwen3_moe": Qwen3MoEBridge, "deepseek_v3": DeepseekV3Bridge}
    bridge = bridges[config["model_type"]].__new__(bridges[config["model_type"]])
    bridge.hf_config = SimpleNamespace(**config)
    bridge.dtype, bridge.make_vocab_size_divisible_by = torch.float32, 1
    bridge.vocab_size, bridge.padded_vocab_size = config["vocab_size"], padded_vocab
    bridge.config = SimpleNamespace(gated_linear_unit=True)
    bridge._get_mcore_config_by_name = lambda _: bridge.config
    # Norms that the Transformer Engine spec fuses into the next linear layer have their own names in the local spec.
    fused = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    }
    if config["model_type"] == "deepseek_v3":
        fused |= {"self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight"}
        fused |= {"input_layernorm.weight": "input_layernorm.weight"}
    asked = name
    for ours, theirs in fused.items():
        asked = asked.replace(ours, theirs)
    if asked.endswith("pre_mlp_layernorm.weight"):
        hf_names = [f"model.layers.{name.split('.')[2]}.post_attention_layernorm.weight"]
    elif name.startswith("output_layer") and config.get("tie_word_embeddings"):
        hf_names = ["model.embed_tokens.weight"]
    elif asked.endswith(".input_layernorm.weight"):
        hf_names = [f"model.layers.{name.split('.')[2]}.input_layernorm.weight"]
    else:
        hf_names = bridge._weight_name_mapping_mcore_to_hf(asked)
    whole = bridge._weight_to_mcore_format(asked, [tensors[n] for n in hf_names])
    return bridge._weight_split_across_tp(asked, whole, torch.empty(shape), size)[rank]


PARALLEL = [
    ("qwen2", TrainParallel(tensor=2, pipeline=2)),
    ("qwen2", TrainParallel(tensor=4, data=2, context=2)),
    ("qwen2_tied", TrainParallel(tensor=2, pipeline=2, vocab_multiple=128)),
    ("qwen2_tied", TrainParallel(tensor=4, pipeline=2, virtual=2)),
    ("qwen2_few_kv", TrainParallel(tensor=4)),
    ("qwen2_few_kv", TrainParallel(tensor=8)),
    ("qwen3", TrainParallel(tensor=2, pipeline=2, pipeline_layers=(3, 1))),
    ("qwen3_moe", TrainParallel(tensor=2, data=4, expert=4, expert_tensor=1)),
    ("qwen3_moe", TrainParallel(tensor=2, data=2, expert=2)),
    ("deepseek", TrainParallel(tensor=2, pipeline=2, data=2, expert=2)),
    ("deepseek", TrainParallel(tensor=4, expert=4, expert_tensor=1, split_latent_down=False)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "parallel"), PARALLEL, ids=lambda v: str(v))
def test_every_local_parameter_equals_the_one_that_mbridge_makes(family, parallel):
    config = FAMILIES[family]
    model = describe(config)
    layout = train_layout(model, parallel)
    layout.check_coverage()
    tensors = full_tensors(model)
    multiple = parallel.vocab_multiple or parallel.tensor
    padded = -(-model.vocab // multiple) * multiple
    for rank, params in enumerate(layout.ranks):
        for param in params:
            expert = ".mlp.experts." in param.name
            size = parallel.experts_tensor if expert else parallel.tensor
            if not parallel.split_latent_down and "_down_proj" in param.name:
                size = 1
            theirs = mbridge_shard(config, param.name, tensors, rank % size, size, param.shape, padded)
            assert torch.equal(build(param, tensors, padding=0.0), theirs), param.name


def test_with_fewer_key_value_heads_than_ranks_some_ranks_own_only_query_rows():
    """B70: 8 query heads, 2 key/value heads of size 4: 48 fused rows, 12 on each of 4 ranks."""
    layout = train_layout(describe(QWEN2_FEW_KV), TrainParallel(tensor=4))
    owned = []
    for params in layout.ranks:
        qkv = next(p for p in params if p.name.endswith("layers.0.self_attention.linear_qkv.weight"))
        assert qkv.shape == (12, 32)
        owned.append({s.name.removeprefix(PREFIX + "self_attn.")[0] for s in qkv.segments})
    assert owned == [{"q"}, {"q", "k", "v"}, {"q"}, {"q", "k", "v"}]


@pytest.mark.parametrize(
    ("layers", "parallel"),
    [
        (48, TrainParallel(pipeline=2)),
        (7, TrainParallel(pipeline=2, pipeline_layers=(4, 3))),
        (30, TrainParallel(pipeline=4, pipeline_layers=(8, 8, 7, 7))),
        (48, TrainParallel(pipeline=4, virtual=3)),
    ],
)
def test_layer_names_are_global_and_come_once(layers, parallel):
    """B73: stage-local numbers would overwrite each other, a floor division would drop layers."""
    layout = train_layout(describe(QWEN2 | dict(num_hidden_layers=layers)), parallel)
    found = [int(p.name.split(".")[2]) for params in layout.ranks for p in params if "linear_proj" in p.name]
    assert sorted(found) == list(range(layers))
    layout.check_coverage()


def test_virtual_stages_go_round_the_ranks():
    layout = train_layout(describe(QWEN2), TrainParallel(pipeline=2, virtual=2))
    layers = [sorted({int(p.name.split(".")[2]) for p in params if ".layers." in p.name}) for params in layout.ranks]
    assert layers == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("layers", "stages", "balanced"), [(7, 2, "[4, 3]"), (30, 4, "[8, 8, 7, 7]")])
def test_layers_that_do_not_divide_are_refused_with_the_balanced_split(layers, stages, balanced):
    """B73: never a floor division."""
    with pytest.raises(ConfigError) as refused:
        train_layout(describe(QWEN2 | dict(num_hidden_layers=layers)), TrainParallel(pipeline=stages))
    assert balanced in str(refused.value)


def test_padded_vocabulary_rows_belong_to_no_tensor():
    """B71: 1003 rows padded to 1024 over 2 ranks: 512 and 491 true rows."""
    layout = train_layout(describe(QWEN2_TIED), TrainParallel(tensor=2, vocab_multiple=128))
    params = [next(p for p in rank if p.name == "embedding.word_embeddings.weight") for rank in layout.ranks]
    assert [p.shape for p in params] == [(512, 32), (512, 32)]
    assert [sum(s.box.rows for s in p.segments) for p in params] == [512, 491]


def test_the_last_stage_has_its_own_copy_of_a_tied_head():
    model = describe(QWEN2_TIED)
    names = [[p.name for p in rank] for rank in train_layout(model, TrainParallel(pipeline=2)).ranks]
    assert "output_layer.weight" not in names[0] and "output_layer.weight" in names[1]
    assert all(
        "output_layer.weight" not in rank for rank in [[p.name for p in train_layout(model, TrainParallel()).ranks[0]]]
    )


def test_replicas_hold_the_same_and_experts_follow_megatrons_rank_order():
    """Inside a stage: tensor fastest, then context, then data; for experts: expert tensor, expert, expert data."""
    layout = train_layout(describe(QWEN3_MOE), TrainParallel(tensor=2, data=4, expert=2, expert_tensor=2))
    experts = [sorted({int(p.name.rsplit("weight", 1)[1]) for p in r if ".experts." in p.name}) for r in layout.ranks]
    assert experts == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2 + [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert layout.ranks[0] is layout.ranks[4] and layout.ranks[1] is layout.ranks[5]


@pytest.mark.parametrize(
    ("config", "parallel", "says"),
    [
        (QWEN2, TrainParallel(tensor=3), "tensor_parallel=3.*attention heads.*2 or 4"),
        (QWEN2 | dict(num_attention_heads=12), TrainParallel(tensor=6), r"=6 .*heads \(4\); nearest legal: 4"),
        (QWEN2, TrainParallel(expert=2), "no experts"),
        (QWEN3_MOE, TrainParallel(data=3, expert=3), r"3 does not divide the model's experts \(8\).*legal: 1"),
        (QWEN3_MOE, TrainParallel(data=3, expert=2), "the 3 ranks of a pipeline stage.*nearest legal: 1"),
        (QWEN2, TrainParallel(virtual=2), "pipeline_parallel >= 2"),
        (QWEN2, TrainParallel(pipeline=2, pipeline_layers=(3, 2)), "4 layers in all"),
        (DEEPSEEK_R1, TrainParallel(tensor=8, pipeline=16, data=3, expert=32, expert_tensor=1,
                                    pipeline_layers=(4,) * 15 + (1,)), "24 ranks of a pipeline.*nearest legal: 8"),
    ],
)  # fmt: skip
def test_illegal_sizes_are_refused_with_the_reason_and_the_nearest_legal_ones(config, parallel, says):
    with pytest.raises(ConfigError, match=says):
        train_layout(describe(config), parallel)


def test_shard_bytes_add_up_to_the_model():
    """Without padding and replicas, the ranks of one replica hold each byte once, norms and routers apart."""
    model = describe(QWEN2)
    layout = train_layout(model, TrainParallel(tensor=2, pipeline=2))
    norms = sum(t.shape[0] for t in model.tensors().values() if "norm" in t.name)
    total = sum(layout.rank_bytes(rank, 4) for rank in range(4))
    elements = sum(torch.Size(t.shape).numel() for t in model.tensors().values())
    assert total == 4 * (elements + norms)
