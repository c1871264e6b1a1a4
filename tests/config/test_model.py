import math

import pytest

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.engines.weights import read_folder
from mindspeed_asyncflow.errors import ConfigError
from tests.reshard.models import DEEPSEEK_R1, FAMILIES


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
