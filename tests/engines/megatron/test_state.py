"""The train state leaves the device and comes back: nothing stays behind, nothing changes."""

import numpy as np
import pytest
import swap_cases
from tiny_models import make_samples, name_of

pytestmark = pytest.mark.slow

TP2, PP2, DP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"data_parallel": 2}
SHARDED = {**DP2, "distributed_optimizer": True}
CASES = [
    ("qwen2", {}, "float32"),
    ("qwen3", {**TP2, "sequence_parallel": True}, "float32"),
    ("qwen2", PP2, "float32"),
    ("qwen2", {**PP2, "virtual_pipeline": 2}, "float32"),
    ("qwen3", SHARDED, "float32"),
    ("qwen3", TP2, "bfloat16"),
    ("qwen2", SHARDED, "bfloat16"),
    ("qwen3_moe", {**DP2, "expert_parallel": 2}, "float32"),
    ("qwen3_moe", {**SHARDED, "expert_parallel": 2}, "bfloat16"),
    ("deepseek_v3", {**TP2, "sequence_parallel": True}, "bfloat16"),
]


@pytest.mark.parametrize(("kind", "sizes", "dtype"), CASES, ids=map(name_of, CASES))
def test_training_continues_bit_identically_after_a_swap(groups, folders, kind, sizes, dtype):
    world = int(np.prod([sizes.get(f"{axis}_parallel", 1) for axis in ("tensor", "pipeline", "data")]))
    for r in groups.of(world).run(
        swap_cases.out_and_back, folder=folders[kind], sizes=sizes, samples=make_samples(), dtype=dtype
    ):
        swapped, plain = r["swapped"], r["plain"]
        assert swapped["empty"], "shards are views of the storages that were emptied"
        assert swapped["left"] < 32768, "beside the train state an engine keeps nothing of weight"
        assert r["kept"] < 32768, "an engine that was closed is gone"
        assert swapped["identical"] and swapped["no gradients"]
        assert swapped["steps"] == plain["steps"]
        for name, weight in plain["weights"].items():
            assert np.array_equal(weight, swapped["weights"][name]), name
        check_bytes(swapped["bytes"], swapped["parameters"], sizes, dtype)


def check_bytes(found, parameters, sizes, dtype):
    """Weights, fp32 gradients, two fp32 moments and fp32 masters beside bf16 weights; at most 2 % padding."""
    width = 2 if dtype == "bfloat16" else 4
    each = 8 + (4 if width == 2 else 0)
    if sizes.get("distributed_optimizer") and "expert_parallel" not in sizes:
        each /= sizes["data_parallel"]
    wanted = {"train weights": width * parameters, "gradients": 4 * parameters, "optimizer": each * parameters}
    for kind, size in wanted.items():
        if kind == "optimizer" and "expert_parallel" in sizes and sizes.get("distributed_optimizer"):
            assert size / 2 < found[kind] < size, "experts are not replicated, so their moments are not shared out"
        else:
            assert size * 0.98 <= found[kind] <= size * 1.02 + 256, kind
