"""The layout that plans are made of is what megatron holds, or the trainer does not start."""

import pytest
import torch

from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.engines.megatron.shards import check_shards, trainer_layout
from mindspeed_asyncflow.errors import WeightSyncError

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 11,
    "tie_word_embeddings": False,
}


@pytest.fixture
def layout():
    return trainer_layout(
        MODEL, TrainerConfig(tensor_parallel=2, pipeline_parallel=2, data_parallel=2, pipeline_layers=[2, 1])
    )


def held(layout, rank):
    return {param.name: torch.empty(param.shape) for param in layout.ranks[rank]}


def test_trainer_sizes_reach_the_layout(layout):
    assert layout.world_size == 8
    layers = [{n.split(".")[2] for n in held(layout, rank) if ".layers." in n} for rank in (0, 7)]
    assert layers == [{"0", "1"}, {"2"}]
    assert held(layout, 7)["output_layer.weight"].shape == (6, 16), "eleven tokens over two ranks"
    for rank in range(8):
        check_shards(layout, rank, held(layout, rank))


def test_a_parameter_of_another_shape_is_named(layout):
    shards = held(layout, 0) | {"decoder.layers.1.mlp.linear_fc2.weight": torch.empty(16, 24)}
    with pytest.raises(
        WeightSyncError, match=r"rank 0.*layers\.1\.mlp\.linear_fc2.* \(16, 24\) .*\(16, 12\) .*TP2 PP2"
    ):
        check_shards(layout, 0, shards)


def test_parameters_on_one_side_only_are_named(layout):
    shards = held(layout, 5)
    shards["decoder.layers.7.input_layernorm.weight"] = torch.empty(16)
    with pytest.raises(WeightSyncError, match=r"layers\.7\.input_layernorm.* is \(16,\) in megatron's .* absent"):
        check_shards(layout, 5, shards)
    del shards["decoder.layers.7.input_layernorm.weight"], shards["decoder.final_layernorm.weight"]
    with pytest.raises(WeightSyncError, match=r"final_layernorm\.weight is absent in megatron's model and \(16,\)"):
        check_shards(layout, 5, shards)
