"""Switches of MindSpeed: what cannot be together, what cannot be used, and what the CPU does not read."""

import re

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.mindspeed import NAMED, REFUSED, master_bytes, rules
from mindspeed_asyncflow.platforms import mindspeed


def found(*settings, platform="npu"):
    config = parse_config("", [f"run.platform={platform}", *(f"trainer.{setting}" for setting in settings)])
    return [(level, keys, text) for level, keys, text in rules(config)]


@pytest.mark.parametrize("platform", ["auto", "cpu", "npu"])
def test_defaults_are_right_everywhere(platform):
    assert found(platform=platform) == []


@pytest.mark.parametrize(
    ("settings", "keys", "says"),
    [
        (["mindspeed.moe_overlap=alltoall"], "moe_overlap", r"raise trainer\.expert_parallel"),
        (["mindspeed.moe_overlap=allgather"], "moe_overlap", "without process groups .*use alltoall"),
        (["mindspeed.moe_overlap=forward_backward"], "moe_overlap", r"megatron\.training"),
        (
            ["mindspeed.moe_overlap=alltoall", "expert_parallel=2", "mindspeed.recompute=[experts]"],
            "moe_overlap",
            r"set trainer\.recompute",
        ),
        (["mindspeed.recompute=[mlp]", "recompute=true"], "recompute", "one of them"),
        (["mindspeed.swap_attention=true", "recompute=true"], "swap_attention", "nothing to swap"),
        (["mindspeed.swap_attention=true", "mindspeed.recompute=[attention]"], "swap_attention", "nothing to swap"),
        (["mindspeed.arguments={smart_swap: true}"], "arguments", r"smart_swap cannot be used: it imports"),
        (["mindspeed.arguments={moe_grouped_gemm: true}"], "arguments", r"set by trainer\.moe_grouped_gemm"),
        (["mindspeed.arguments={use_flash_attn: false}"], "arguments", r"set by trainer\.mindspeed\.flash_attention"),
        (["mindspeed.arguments={--use-ascend-mc2: true}"], "arguments", "write 'use_ascend_mc2'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings, keys, says):
    ((level, named, text),) = found(*settings)
    assert level == "error" and named[0] == f"trainer.mindspeed.{keys}"
    assert re.search(says, text), text


@pytest.mark.parametrize("platform", ["cpu", "npu"])
def test_ring_is_used_on_every_platform_and_only_with_several_ranks(platform):
    assert found("mindspeed.context_parallel=ring", "context_parallel=2", platform=platform) == []
    ((level, keys, text),) = found("mindspeed.context_parallel=ring", platform=platform)
    assert (level, keys[0]) == ("warning", "trainer.mindspeed.context_parallel")
    assert "trainer.context_parallel is 1" in text


@pytest.mark.parametrize("platform", ["cpu", "npu"])
def test_masters_are_halved_on_every_platform_and_only_where_there_are_some(platform):
    of = {}
    for dtype in ("bfloat16", "float32"):
        for reuse in ("false", "true"):
            given = [f"run.platform={platform}", f"model.dtype={dtype}", f"trainer.mindspeed.reuse_fp32_param={reuse}"]
            config = parse_config("", given)
            of[dtype, reuse] = master_bytes(config), [(level, keys[0]) for level, keys, _ in rules(config)]
    key = "trainer.mindspeed.reuse_fp32_param"
    assert of["bfloat16", "false"] == (4, []) and of["bfloat16", "true"] == (2, [])
    assert of["float32", "false"] == (0, []) and of["float32", "true"] == (0, [("warning", key)])


def test_an_argument_that_no_setting_stands_for_is_passed_on():
    config = parse_config("", ["trainer.mindspeed.arguments={cp_window_size: 2}"])
    assert list(rules(config)) == []
    assert mindspeed.arguments(config.trainer.mindspeed)["cp_window_size"] == 2


def test_every_switch_reaches_mindspeed_under_its_name():
    config = parse_config("", ["trainer.mindspeed.fused_rope=false", "trainer.mindspeed.flash_attention=false"])
    given = mindspeed.arguments(config.trainer.mindspeed)
    assert (given["use_fused_rotary_pos_emb"], given["use_flash_attn"]) == (False, False)
    assert (given["use_fused_rmsnorm"], given["use_fused_swiglu"]) == (True, True)
    operators = mindspeed.operators(config.trainer.mindspeed)
    assert operators == {"rms_norm": True, "swiglu": True, "rotary": False, "attention_packed": False}
    assert set(NAMED).isdisjoint(REFUSED)


def test_on_the_cpu_operators_and_device_memory_have_no_use():
    warned = found(
        "mindspeed.swap_attention=true", "mindspeed.fused_rope=false", "mindspeed.recompute=[mlp]", platform="cpu"
    )
    assert [(level, keys[0]) for level, keys, _ in warned] == [
        ("warning", "trainer.mindspeed.fused_rope"),
        ("warning", "trainer.mindspeed.swap_attention"),
    ]
