"""Which ways to cut a model are legal."""

import pytest

from mindspeed_asyncflow.config.parallel import check_parallel, nearest_divisors
from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.errors import ConfigError

DENSE = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "num_hidden_layers": 6}
SPARSE = {**DENSE, "num_experts": 8, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (DENSE, {}),
        (DENSE, {"tensor_parallel": 4, "sequence_parallel": True, "pipeline_parallel": 3, "virtual_pipeline": 2}),
        (DENSE, {"tensor_parallel": 2, "context_parallel": 4}),
        (SPARSE, {"data_parallel": 2, "context_parallel": 2, "expert_parallel": 4}),
    ],
)
def test_legal_sizes_pass(model, sizes):
    check_parallel(model, TrainerConfig(**sizes))


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (DENSE, {"tensor_parallel": 3}, r"tensor_parallel=3 .*attention heads \(8\); nearest legal: 2 or 4"),
        (DENSE, {"tensor_parallel": 8}, r"tensor_parallel=8 .*key/value heads \(4\); nearest legal: 4"),
        (DENSE, {"context_parallel": 3}, r"context_parallel=3 .*; nearest legal: 2 or 4"),
        (DENSE, {"pipeline_parallel": 4}, r"pipeline_parallel=4 .*layers \(6\); nearest legal: 3 or 6"),
        (DENSE, {"pipeline_parallel": 2, "virtual_pipeline": 2}, r"virtual_pipeline=2 .*\(3\); nearest legal: 1 or 3"),
        (DENSE, {"virtual_pipeline": 2}, "pipeline_parallel >= 2"),
        (DENSE, {"sequence_parallel": True}, "tensor_parallel >= 2"),
        (DENSE, {"expert_parallel": 2, "data_parallel": 2}, "no experts"),
        (SPARSE, {"expert_parallel": 2}, r"expert_parallel=2 .*= 1.*nearest legal: 1"),
        (SPARSE, {"expert_parallel": 3, "data_parallel": 3}, r"experts \(8\); nearest legal: 2 or 4"),
        (SPARSE, {"tensor_parallel": 2}, "sequence_parallel: true"),
    ],
)
def test_illegal_sizes_name_the_nearest_legal_ones(model, sizes, message):
    with pytest.raises(ConfigError, match=message):
        check_parallel(model, TrainerConfig(**sizes))


def test_nearest_divisors_from_both_sides():
    assert nearest_divisors(12, 5) == [4, 6]
    assert nearest_divisors(12, 12) == [12]
