"""Which ways to cut a model are legal."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import (
    RolloutParallel,
    TrainParallel,
    balanced_split,
    check_parallel,
    check_rollout,
    check_train,
    nearest,
)
from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.errors import ConfigError

DENSE = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
}
SIX_KV = {**DENSE, "num_attention_heads": 12, "num_key_value_heads": 6}
SPARSE = {**DENSE, "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 8, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (DENSE, {}),
        (DENSE, {"tensor_parallel": 4, "sequence_parallel": True, "pipeline_parallel": 3, "virtual_pipeline": 2}),
        (DENSE, {"tensor_parallel": 8}),  # two ranks for each key/value head
        (DENSE, {"tensor_parallel": 2, "context_parallel": 4}),
        (DENSE, {"pipeline_parallel": 4, "pipeline_layers": [2, 1, 1, 2]}),
        (DENSE, {"pipeline_parallel": 2, "virtual_pipeline": 2, "pipeline_layers": [1, 2, 2, 1]}),
        (SPARSE, {"data_parallel": 2, "context_parallel": 2, "expert_parallel": 4}),
        (DENSE, {"context_parallel": 3, "mindspeed": {"context_parallel": "ring"}}),
    ],
)
def test_legal_sizes_pass(model, sizes):
    check_parallel(model, TrainerConfig(**sizes))


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (DENSE, {"tensor_parallel": 3}, r"tensor_parallel=3 .*attention heads \(8\); nearest legal: 2 or 4"),
        (SIX_KV, {"tensor_parallel": 4}, r"tensor_parallel=4 .*key/value heads \(6\); nearest legal: 3 or 6"),
        (DENSE, {"context_parallel": 3}, r"context_parallel=3 .*; nearest legal: 2 or 4; .*: ring takes any"),
        (DENSE, {"pipeline_parallel": 4}, r"pipeline_parallel=4 .*layers \(6\); nearest legal: 3 or 6"),
        (DENSE, {"pipeline_parallel": 2, "virtual_pipeline": 2}, r"virtual_pipeline=2 .*\(3\); nearest legal: 1 or 3"),
        (DENSE, {"pipeline_parallel": 2, "virtual_pipeline": 2}, r"trainer\.pipeline_layers=\[2, 2, 1, 1\]"),
        (DENSE, {"pipeline_parallel": 7}, r"nearest legal: 6$"),
        (DENSE, {"pipeline_layers": [6]}, "pipeline_parallel >= 2"),
        (
            DENSE,
            {"pipeline_parallel": 2, "pipeline_layers": [4, 3]},
            r"2 stages .* 6 layers in all; balanced: \[3, 3\]",
        ),
        (DENSE, {"pipeline_parallel": 2, "pipeline_layers": [6, 0]}, "at least one layer each"),
        (DENSE, {"pipeline_parallel": 2, "virtual_pipeline": 2, "pipeline_layers": [3, 3]}, "2 x virtual_pipeline=2"),
        (DENSE, {"virtual_pipeline": 2}, "pipeline_parallel >= 2"),
        (DENSE, {"sequence_parallel": True}, "tensor_parallel >= 2"),
        (DENSE, {"expert_parallel": 2, "data_parallel": 2}, "no experts"),
        (SPARSE, {"expert_parallel": 2}, r"expert_parallel=2 .*the 1 ranks.*nearest legal: 1"),
        (SPARSE, {"expert_parallel": 3, "data_parallel": 3}, r"experts \(8\); nearest legal: 1$"),
        (SPARSE, {"tensor_parallel": 2}, "sequence_parallel: true"),
    ],
)
def test_illegal_sizes_name_the_nearest_legal_ones(model, sizes, message):
    with pytest.raises(ConfigError, match=message):
        check_parallel(model, TrainerConfig(**sizes))


def test_the_nearest_legal_sizes_are_sought_on_both_sides():
    assert nearest(5, lambda n: 12 % n == 0, 12) == "4 or 6"
    assert nearest(12, lambda n: 12 % n == 0, 12) == "12"
    assert nearest(3, lambda n: n > 9, 12) == "10"
    assert nearest(3, lambda n: False, 12) == "none"


@pytest.mark.parametrize(
    ("layers", "stages", "split"), [(7, 2, [4, 3]), (30, 4, [8, 8, 7, 7]), (48, 2, [24, 24]), (3, 3, [1, 1, 1])]
)
def test_layers_that_do_not_divide_are_refused_with_the_balanced_split(layers, stages, split):
    """B73: 30 layers over 4 stages are refused, or split explicitly; never floored."""
    assert balanced_split(layers, stages) == split
    model = {**DENSE, "num_hidden_layers": layers}
    if layers % stages:
        with pytest.raises(ConfigError, match=str(split).replace("[", r"\[")):
            check_parallel(model, TrainerConfig(pipeline_parallel=stages))
    check_parallel(model, TrainerConfig(pipeline_parallel=stages, pipeline_layers=split))


LATENT = {  # DeepSeek-V3 style; its key/value heads are made from a latent, so their number does not matter
    **DENSE,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 3,
    "qk_nope_head_dim": 8,
    "n_shared_experts": 1,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 10,
}


def test_latent_attention_is_cut_by_its_down_projections():
    check_parallel(LATENT, TrainerConfig(tensor_parallel=2, sequence_parallel=True))
    with pytest.raises(ConfigError, match=r"tensor_parallel=4 .*kv_lora_rank \+ qk_rope_head_dim \(34\)"):
        check_parallel(LATENT, TrainerConfig(tensor_parallel=4, sequence_parallel=True))
    with pytest.raises(ConfigError, match=r"feed-forward width \(95\)"):  # of the leading dense layers
        check_parallel({**LATENT, "intermediate_size": 95}, TrainerConfig(tensor_parallel=2, sequence_parallel=True))


@given(data=st.data())
def test_every_size_that_is_proposed_is_legal(data):
    """Other sizes stay as they are; "none" is said only where none is."""
    draw = data.draw
    kv_heads = draw(st.integers(1, 6))
    model = {
        **draw(st.sampled_from([DENSE, SPARSE, LATENT])),
        "num_attention_heads": kv_heads * draw(st.integers(1, 6)),
        "num_key_value_heads": kv_heads,
        "intermediate_size": draw(st.integers(8, 96)),
        "num_hidden_layers": draw(st.integers(1, 12)),
        "head_dim": draw(st.sampled_from([1, 3, 4, 6])),
    }
    shape = describe(model)
    sizes = {name: draw(st.integers(1, 9)) for name in ("tensor", "data", "expert")}
    asked = draw(st.sampled_from([TrainParallel(**sizes, pipeline=draw(st.integers(1, 5))), RolloutParallel(**sizes)]))
    check = check_train if isinstance(asked, TrainParallel) else check_rollout
    try:
        check(shape, asked)
    except ConfigError as error:
        found = re.search(
            r"^(?:trainer|rollout)\.(tensor|data|expert|pipeline)\w*=.*nearest legal: ([\d or]+|none)", str(error)
        )
        if found is None or found[2] == "none":
            return
        for size in map(int, found[2].split(" or ")):
            try:
                check(shape, replace(asked, **{found[1]: size}))
            except ConfigError as other:
                assert not re.match(rf"\w+\.{found[1]}", str(other)), f"{error}\n{other}"


@pytest.mark.parametrize("sizes", [{"tensor": 0}, {"pipeline": 0}, {"virtual": -1}, {"expert_tensor": 0}])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ConfigError, match=next(iter(sizes))):
        TrainParallel(**sizes)
    with pytest.raises(ConfigError, match="replicas=0"):
        RolloutParallel(replicas=0)


def test_fused_rows_that_ranks_cannot_share_are_refused():
    """12 heads and 2 key/value heads of 128: 2048 fused rows, which 6 ranks cannot share."""
    model = {**DENSE, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}
    with pytest.raises(ConfigError, match=r"fused queries, keys and values \(2048\); nearest legal: 4 or 8|legal: 4$"):
        check_parallel(model, TrainerConfig(tensor_parallel=6))
