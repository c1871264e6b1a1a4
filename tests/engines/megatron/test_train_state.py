"""Train state on disk: nothing of it is lost, in the same parallel layout or another; and the pause it costs."""

from pathlib import Path

import checkpoint_cases
import numpy as np
import pytest
from tiny_models import make_model, make_samples

from mindspeed_asyncflow.errors import CheckpointError
from mindspeed_asyncflow.observe.checkpoints import sums
from mindspeed_asyncflow.reshard.hf_folder import export_hf

pytestmark = pytest.mark.slow

TP2 = {"tensor_parallel": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_parallel": 2}
DP2 = {"data_parallel": 2}
SHARDED = {**DP2, "distributed_optimizer": True}
UNEVEN = {**PP2, "pipeline_layers": [3, 1]}
EP2 = {**DP2, "expert_parallel": 2}
GROUPED = {"moe_grouped_gemm": True}
MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen2_2_kv_heads": (
        "qwen2",
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 32},
    ),
}


def world_of(sizes):
    axes = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel")
    return int(np.prod([sizes.get(axis, 1) for axis in axes]))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> (folder, transformers model), made when first asked for."""

    class Models(dict):
        def __missing__(self, name):
            folder = str(tmp_path_factory.mktemp(name))
            kind, changes = MODELS[name]
            self[name] = (folder, make_model(kind, folder, **changes))
            return self[name]

    return Models()


def save(groups, models, kind, sizes, out, **how):
    run = groups.of(world_of(sizes)).run
    return run(checkpoint_cases.save, folder=models[kind][0], sizes=sizes, samples=make_samples(), out=str(out), **how)


def load(groups, models, kind, sizes, out, **how):
    run = groups.of(world_of(sizes)).run
    return run(checkpoint_cases.load, folder=models[kind][0], sizes=sizes, samples=make_samples(), out=str(out), **how)


def equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype"),
    [
        ("qwen2", {}, "bfloat16"),
        ("qwen2", {**PP2, "virtual_pipeline": 2}, "float32"),
        ("qwen2", SHARDED, "bfloat16"),
        ("qwen3_moe", {**EP2, "distributed_optimizer": True}, "float32"),
        ("deepseek_v3", SP2, "float32"),
        ("qwen3_moe", {**EP2, **GROUPED}, "bfloat16"),
    ],
    ids=["one", "pipeline", "sharded", "experts", "latent", "grouped"],
)
def test_a_save_during_training_continues_bit_for_bit(groups, models, tmp_path, kind, sizes, dtype):
    before = save(groups, models, kind, sizes, tmp_path, before=2, after=2, dtype=dtype)
    after = load(groups, models, kind, sizes, tmp_path, after=2, dtype=dtype)
    for one, other in zip(before, after):
        assert equal(one["at"], other["at"]), "training wrote into what was being saved"
        assert one["steps"] == other["steps"]
        assert equal(one["weights"], other["weights"])
    said = sorted((file for r in before for file in r["files"]), key=lambda file: file.name)
    assert said == sorted(sums(tmp_path), key=lambda file: file.name)


@pytest.mark.parametrize(
    ("kind", "first", "second", "dtype"),
    [
        ("qwen2", {}, TP2, "float32"),
        ("qwen2", {}, UNEVEN, "float32"),
        ("qwen2", {}, SHARDED, "bfloat16"),
        ("qwen2", SHARDED, PP2, "float32"),
        ("qwen3", SP2, SHARDED, "float32"),
        ("qwen3_moe", {**EP2, "distributed_optimizer": True}, SP2, "float32"),
        ("deepseek_v3", PP2 | {"pipeline_layers": [1, 2]}, EP2, "float32"),
        ("qwen3_moe", SP2, {**SHARDED, **GROUPED}, "float32"),
        ("qwen3_moe", {**SHARDED, **GROUPED}, EP2, "float32"),
    ],
    ids=["tensor", "uneven", "sharded", "from_sharded", "sequence", "experts", "latent", "grouped", "from_grouped"],
)
def test_moments_survive_another_parallel_layout(groups, models, tmp_path, kind, first, second, dtype):
    before = save(groups, models, kind, first, tmp_path, dtype=dtype)[0]
    for after in load(groups, models, kind, second, tmp_path, dtype=dtype):
        assert equal(before["at"], after["at"])
        assert after["moments"].keys() == {"exp_avg", "exp_avg_sq"} and all(m > 0 for m in after["moments"].values())
        losses, rates, norms = (np.array(column) for column in zip(*after["steps"]))
        wanted = [np.array(column) for column in zip(*before["steps"])]
        near = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
        assert losses == pytest.approx(wanted[0], rel=near, abs=near)
        assert rates == pytest.approx(wanted[1], rel=1e-12)
        assert norms == pytest.approx(wanted[2], rel=10 * near)


def test_a_save_before_the_first_step_holds_no_moments(groups, models, tmp_path):
    folder = models["qwen2"][0]
    groups.of(1).run(checkpoint_cases.save_untrained, folder=folder, sizes={}, out=str(tmp_path))
    (fresh,) = save(groups, models, "qwen2", {}, tmp_path / "other", before=0, after=2)
    (loaded,) = load(groups, models, "qwen2", {}, tmp_path, after=2)
    assert loaded["moments"] == {} and loaded["steps"] == fresh["steps"]


def test_the_pause_copies_each_byte_of_the_state_once(groups, tmp_path):
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "vocab_size": 4096, "num_hidden_layers": 4}
    make_model("qwen2", str(tmp_path / "model"), **sizes)
    (found,) = groups.of(1).run(
        checkpoint_cases.pause_over_copy, folder=str(tmp_path / "model"), samples=make_samples(),
        out=str(tmp_path / "out"), times=1,
    )  # fmt: skip
    assert found["moved"] == found["bytes"] > 80e6 and found["written"] > found["bytes"]


def test_what_a_save_lacks_is_named(groups, models, tmp_path):
    kinds = {"qwen2": {}, "qwen2_2_kv_heads": {}}
    save(groups, models, "qwen2", SHARDED, tmp_path, before=1, after=0)

    def refused(kind, dtype="float32"):
        (said,) = groups.of(1).run(
            checkpoint_cases.refused, folder=models[kind][0], sizes=kinds[kind], out=str(tmp_path), dtype=dtype
        )
        return said

    assert refused("qwen2") == ""
    assert "F32, not as BF16" in refused("qwen2", "bfloat16")
    assert "model.embed_tokens.weight is (125, 64) there and (125, 32)" in refused("qwen2_2_kv_heads")
    path = tmp_path / "rank00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "rank00001.safetensors" in refused("qwen2")
    path.unlink()
    assert "rank00001.safetensors" in refused("qwen2")


def test_a_disk_that_refuses_is_explained_and_the_next_save_succeeds(groups, models, tmp_path):
    (found,) = groups.of(1).run(
        checkpoint_cases.failing_disk, folder=models["qwen2"][0], samples=make_samples(), out=str(tmp_path)
    )
    assert "ulimit -f" in found["said"] and "rank00000.safetensors" in found["said"]
    assert sorted(file.name for file in found["files"]) == [file.name for file in sums(tmp_path / "second")]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen2", {**PP2, "virtual_pipeline": 2}),
        ("qwen3", SP2),
        ("deepseek_v3", {**SP2, **DP2, "expert_parallel": 2}),
    ],
    ids=["pipeline", "tensor", "latent"],
)
def test_exported_weights_are_those_of_the_model_bit_for_bit(groups, models, tmp_path, kind, sizes):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder, model = models[kind]
    state, out = tmp_path / "trainer", tmp_path / "hf"
    groups.of(world_of(sizes)).run(checkpoint_cases.save_untrained, folder=folder, sizes=sizes, out=str(state))
    export_hf(state, out)
    before, after = (load_file(f"{f}/model.safetensors") for f in (folder, out))
    assert before.keys() == after.keys()
    assert all(bool((before[n] == after[n]).all()) for n in before)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert all(bool((p == q).all()) for p, q in zip(model.parameters(), loaded.parameters()))
    with pytest.raises(CheckpointError, match="exists already"):
        export_hf(state, Path(out))
