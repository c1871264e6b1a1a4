import math

import pytest

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.engines.weights import read_folder
from mindspeed_asyncflow.errors import ConfigError
from tests.reshard.models import DEEPSEEK_R1, FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_that_transformers_saves(family, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(FAMILIES[family])
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = describe(config.to_dict())
    assert {name: t.shape for name, t in model.tensors().items()} == read_folder(str(tmp_path)).shapes


def test_deepseek_r1_has_671_billion_parameters():
    """The published total, 671B, is without the multi-token-prediction layer."""
    count = sum(math.prod(t.shape) for t in describe(DEEPSEEK_R1).tensors().values())
    assert round(count / 1e9) == 671


def test_tensors_come_in_layer_order():
    orders = [t.order for t in describe(FAMILIES["deepseek"]).tensors().values()]
    assert orders == sorted(orders) and orders[0] == 0 and orders[-1] == 5


def test_experts_are_missing_in_the_layers_that_are_dense():
    model = describe(FAMILIES["qwen3_moe"] | dict(mlp_only_layers=[2]))
    assert [model.is_moe(layer) for layer in range(4)] == [True, True, False, True]
    assert "model.layers.2.mlp.gate_proj.weight" in model.tensors()
    assert [describe(FAMILIES["qwen3_moe"] | dict(decoder_sparse_step=2)).is_moe(n) for n in range(4)] == [0, 1, 0, 1]


def test_an_unknown_family_and_a_missing_size_are_named():
    with pytest.raises(ConfigError, match=r"'gpt2'.*qwen2"):
        describe(dict(model_type="gpt2"))
    with pytest.raises(ConfigError, match="hidden_size"):
        describe({k: v for k, v in FAMILIES["qwen2"].items() if k != "hidden_size"})


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("qwen2", {"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number of at least 1"),
        ("qwen2", {"num_hidden_layers": -2}, "num_hidden_layers=-2"),
        ("qwen2", {"vocab_size": "120"}, "vocab_size='120'"),
        ("qwen2", {"hidden_size": None}, "hidden_size=None"),
        ("qwen2", {"intermediate_size": True}, "intermediate_size=True"),
        ("qwen2", {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=8"),
        ("qwen3", {"attention_bias": True}, "attention_bias is not supported"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("deepseek", {"first_k_dense_replace": None}, "first_k_dense_replace=None"),
        ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ],
)
def test_strange_sizes_are_named_with_their_value(family, change, says):
    with pytest.raises(ConfigError, match=says):
        describe(FAMILIES[family] | change)


def test_null_means_what_transformers_means_by_it():
    assert describe(FAMILIES["qwen2"] | {"num_key_value_heads": None}).kv_heads == 8
    plain = describe(FAMILIES["deepseek"] | {"q_lora_rank": None, "n_shared_experts": None})
    assert plain.latent.q_rank == 0 and plain.experts.shared_width == 0


@pytest.mark.parametrize(("family", "missing"), [("qwen3", "head_dim"), ("deepseek", "q_lora_rank")])
def test_sizes_whose_default_differs_between_libraries_must_be_there(family, missing):
    with pytest.raises(ConfigError, match=f"no '{missing}'"):
        describe({k: v for k, v in FAMILIES[family].items() if k != missing})
