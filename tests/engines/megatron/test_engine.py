"""The trainer against transformers, over every way to cut it, and what must not depend on the cut."""

import numpy as np
import pytest
import rank_cases
from tiny_models import make_model, make_samples, name_of, reference

pytestmark = pytest.mark.slow

TP2 = {"tensor_parallel": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_parallel": 2}
DP2 = {"data_parallel": 2}
RING2 = {"context_parallel": 2, "mindspeed": {"context_parallel": "ring"}}
CASES = [
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3_moe", {}),
    ("qwen3", {"recompute": True}),
    ("qwen3", {"mindspeed": {"recompute": ["attention", "mlp"]}}),
    ("qwen3_moe", {"mindspeed": {"recompute": ["experts"]}}),
    ("qwen2", TP2),
    ("qwen3", TP2),
    ("qwen2", SP2),
    ("qwen3", SP2),
    ("qwen3_moe", SP2),
    ("qwen2", PP2),
    ("qwen3", PP2),
    ("qwen2", {**PP2, "virtual_pipeline": 2}),
    ("qwen3_moe", {**PP2, "virtual_pipeline": 2}),
    ("qwen2", DP2),
    ("qwen3", {**DP2, "distributed_optimizer": True}),
    ("qwen2", {"context_parallel": 2}),
    ("qwen3", {"context_parallel": 2}),
    ("qwen3_moe", {**DP2, "expert_parallel": 2}),
    ("qwen2", {**TP2, **PP2}),
    ("qwen3", {**SP2, **DP2, "distributed_optimizer": True}),
    ("qwen2", {**SP2, "context_parallel": 2}),
    ("qwen3_moe", {**SP2, **DP2, "expert_parallel": 2}),
    ("qwen2_7_layers", {**PP2, "pipeline_layers": [4, 3]}),
    ("qwen2_7_layers", {**PP2, "virtual_pipeline": 2, "pipeline_layers": [2, 1, 1, 3]}),
    ("qwen2_2_kv_heads", {"tensor_parallel": 4}),
    ("qwen3_2_kv_heads", {"tensor_parallel": 4, "sequence_parallel": True}),
    ("qwen2_1_kv_head", {**TP2, "context_parallel": 2}),
    ("deepseek_v3", {}),
    ("deepseek_v3", SP2),
    ("deepseek_v3", {**PP2, "pipeline_layers": [2, 1], "recompute": True}),
    ("deepseek_v3", {"context_parallel": 2}),
    ("deepseek_v3", {**SP2, **DP2, "expert_parallel": 2}),
    ("deepseek_v3_plain_queries", SP2),
    ("deepseek_v3_yarn", {}),
    ("deepseek_v3", {"moe_grouped_gemm": True}),
    ("qwen3_moe", {**SP2, **DP2, "expert_parallel": 2, "moe_grouped_gemm": True}),
    ("qwen2", RING2),
    ("qwen3_moe", {**RING2, "expert_parallel": 2}),
    ("deepseek_v3", RING2),
    ("qwen2", {**SP2, **RING2}),
    ("qwen3", {**PP2, **RING2}),
    ("qwen2_1_kv_head", {"context_parallel": 4, "mindspeed": {"context_parallel": "ring", "recompute": ["attention"]}}),
]
KV = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64}
YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # as DeepSeek-R1 but for its length
MODELS = {  # name -> kind and changed sizes
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_plain_queries": ("deepseek_v3", {"q_lora_rank": None, "num_hidden_layers": 2}),
    "deepseek_v3_yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "qwen2_7_layers": ("qwen2", {"num_hidden_layers": 7, "tie_word_embeddings": False}),
    "qwen2_48_layers": ("qwen2", {"num_hidden_layers": 48, "hidden_size": 16, "intermediate_size": 16}),
    "qwen2_1003_tokens": ("qwen2", {"vocab_size": 1003, "num_hidden_layers": 1, "tie_word_embeddings": False}),
    "qwen2_1003_tokens_tied": ("qwen2", {"vocab_size": 1003, "num_hidden_layers": 1}),
    "qwen2_2_kv_heads": ("qwen2", {**KV, "hidden_size": 32}),
    "qwen3_2_kv_heads": ("qwen3", KV),
    "qwen2_1_kv_head": ("qwen2", {"num_key_value_heads": 1}),
}


def world_of(sizes):
    axes = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel")
    return int(np.prod([sizes.get(axis, 1) for axis in axes]))


CASES.sort(key=lambda case: world_of(case[1]))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> (folder, transformers model)"""
    found = {}
    for name, (kind, changes) in MODELS.items():
        folder = str(tmp_path_factory.mktemp(name))
        found[name] = (folder, make_model(kind, folder, **changes))
    return found


@pytest.fixture(scope="module")
def references(models):
    return {kind: reference(model, make_samples(), temperature=0.7) for kind, (_, model) in models.items()}


def distance(a, b):
    """Relative, over a whole tensor."""
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-12))


@pytest.mark.parametrize(("kind", "sizes"), CASES, ids=map(name_of, CASES))
def test_trainer_agrees_with_transformers(groups, models, references, kind, sizes):
    expected = references[kind]
    ranks = groups.of(world_of(sizes)).run(
        rank_cases.agree, folder=models[kind][0], sizes=sizes, samples=make_samples()
    )
    by_replica = {r["replica"]: r for r in ranks}
    replicas = [by_replica[i] for i in sorted(by_replica)]
    logprobs = np.concatenate([r["logprobs"] for r in replicas])
    assert np.abs(logprobs - expected["logprobs"]).max() < 2e-5
    for key, wanted in (("loss_sum", expected["loss"]), ("entropy_sum", expected["entropy"])):
        assert sum(r["metrics"][key] for r in replicas) == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    for r in ranks:
        assert r["metrics"] == by_replica[r["replica"]]["metrics"], "all ranks of a replica report the same"
        assert r["norm"] == pytest.approx(expected["norm"] / 10.0, rel=1e-5)
        assert r["applied"]
        if r["grads"] is not None:
            assert r["grads"].keys() == expected["grads"].keys()
            worst = max((distance(r["grads"][n], g), n) for n, g in expected["grads"].items())
            assert worst[0] < 2e-5, worst
        assert all(np.array_equal(w, ranks[0]["weights"][n]) for n, w in r["weights"].items())
    for name, buffer in dict(models[kind][1].named_buffers()).items():
        if name.endswith("e_score_correction_bias"):  # a weight that no optimizer step may change
            assert np.array_equal(ranks[0]["weights"][name], buffer.numpy())


@pytest.mark.parametrize("sizes", [RING2, {**SP2, **RING2}], ids=["ring", "ring_and_tensor"])
def test_ring_has_the_loss_and_gradients_of_one_rank(groups, models, sizes):
    whole, ring = (
        groups.of(world_of(s)).run(rank_cases.agree, folder=models["qwen3"][0], sizes=s, samples=make_samples())[0]
        for s in ({}, sizes)
    )
    assert ring["metrics"] == pytest.approx(whole["metrics"], rel=1e-5)
    assert max(distance(ring["grads"][n], g) for n, g in whole["grads"].items()) < 1e-5


def test_distributed_optimizer_takes_the_same_step(groups, models):
    plain, sharded = (
        groups.of(2).run(rank_cases.agree, folder=models["qwen3"][0], sizes=sizes, samples=make_samples())[0]
        for sizes in (DP2, {**DP2, "distributed_optimizer": True})
    )
    for name, weight in plain["weights"].items():
        assert np.abs(weight - sharded["weights"][name]).max() < 1e-6, name


def test_bfloat16_stays_near_float32(groups, models, references):
    ranks = groups.of(2).run(
        rank_cases.agree, folder=models["qwen3"][0], sizes=SP2, samples=make_samples(), dtype="bfloat16"
    )
    assert np.abs(ranks[0]["logprobs"] - references["qwen3"]["logprobs"]).max() < 0.25
    assert ranks[0]["norm"] == pytest.approx(references["qwen3"]["norm"] / 10.0, rel=0.05)


def test_gradient_does_not_depend_on_the_cut(groups, models):
    """B06: micro-batch sizes, several calls and trailing singles give one gradient."""
    ways = [[(8,)], [(1,) * 8], [(3, 5)], [(2, 2), (4,)], [(1,), (1, 1), (5,)]]
    for found in groups.of(1).run(
        rank_cases.cuts, folder=models["qwen2"][0], sizes={}, samples=make_samples(), ways=ways
    ):
        for other in found[1:]:
            worst = max(distance(other[n], g) for n, g in found[0].items())
            assert worst < 4e-6  # rounding of fp32 products: up to 1.6e-6 on the processors tried


def test_logprobs_do_not_depend_on_the_cut(groups, models):
    """B25: micro-batches of 1 and of 8 samples; at equal weights the policy ratio is 1 within 1e-5."""
    ways = [(8,), (1,) * 8, (3, 5)]
    (found,) = groups.of(1).run(rank_cases.scored_in_cuts, folder=models["qwen2"][0], samples=make_samples(), ways=ways)
    for other in found[1:]:
        assert np.abs(np.exp(other - found[0]) - 1).max() < 1e-5


@pytest.mark.parametrize("sizes", [{}, SP2], ids=["one", "tensor"])
def test_output_layer_in_pieces_gives_the_same_gradient(groups, models, sizes):
    for whole, pieces in groups.of(world_of(sizes)).run(
        rank_cases.chunked_head, folder=models["qwen2"][0], sizes=sizes, samples=make_samples()
    ):
        assert max(distance(pieces[n], g) for n, g in whole.items()) < 1e-5


def test_a_batch_without_a_trained_token_changes_nothing(groups, models):
    """B09: loss 0, gradients 0, no nan, no step."""
    (found,) = groups.of(1).run(rank_cases.nothing_trained, folder=models["qwen2"][0], samples=make_samples())
    assert found["metrics"]["loss_sum"] == 0 and found["metrics"]["tokens_count"] == 0
    assert found["zero"] and found["unchanged"] and not found["applied"]


@pytest.mark.parametrize(
    ("kind", "sizes", "layers"),
    [
        ("qwen3", {**PP2, "virtual_pipeline": 2}, 4),
        ("qwen2_7_layers", {**PP2, "pipeline_layers": [4, 3]}, 7),
        ("qwen2_48_layers", PP2, 48),
        ("qwen2_48_layers", {**PP2, "virtual_pipeline": 3, "pipeline_layers": [9, 7, 8, 8, 7, 9]}, 48),
    ],
    ids=["virtual", "uneven", "many", "many_uneven_virtual"],
)
def test_every_layer_has_its_global_name_once(groups, models, kind, sizes, layers):
    """B73: shards of the stages never share a layer, and the export is in layer order, whichever stage holds what."""
    ranks = groups.of(2).run(rank_cases.names, folder=models[kind][0], sizes=sizes)
    held = [name for r in ranks for name in r["shards"] if name.endswith("self_attention.linear_proj.weight")]
    assert sorted(int(name.split(".")[2]) for name in held) == list(range(layers))
    names = ranks[0]["exported"]
    assert names == ranks[1]["exported"]
    assert names[0] == "model.embed_tokens.weight" and ".layers." not in names[-1]
    found = [int(n.split(".")[2]) for n in names if ".layers." in n]
    assert found == sorted(found) and set(found) == set(range(layers))
    assert len(set(names)) == len(names)


def test_few_key_value_heads_are_cut_by_rows_of_the_fused_matrix(groups, models):
    """B70: 12 of 48 rows on each rank, of which ranks 0 and 2 hold queries only."""
    ranks = groups.of(4).run(rank_cases.qkv_rows, folder=models["qwen2_2_kv_heads"][0], sizes={"tensor_parallel": 4})
    parts = [r["names"] for r in ranks]
    assert [r["rows"] for r in ranks] == [12] * 4
    assert [set(found) for found in parts] == [{"q_proj"}, {"q_proj", "k_proj", "v_proj"}] * 2
    for part, rows in (("q_proj", 32), ("k_proj", 8), ("v_proj", 8)):
        assert sum(found.get(part, 0) for found in parts) == rows
    assert all(r["equal"] for r in ranks)


@pytest.mark.parametrize("kind", ["qwen2_1003_tokens", "qwen2_1003_tokens_tied"])
def test_padding_rows_of_the_vocabulary_never_show(groups, models, kind):
    """B71: 1003 tokens over two ranks. Uniform logits give -log 1003 whatever the padding row holds; it is not
    exported."""
    for r in groups.of(2).run(rank_cases.padded_vocabulary, folder=models[kind][0], samples=make_samples()):
        assert r["rows"] == 502
        assert np.array_equal(r["before"], r["padding at 50"])
        assert r["exported"] == (1003, 64) and r["equal"]
        trained = r["uniform"][r["uniform"] != 0]
        assert len(trained) and np.abs(trained + 6.91075).max() < 1e-5


def test_interleaved_pipeline_is_right_every_time(groups, models, references):
    """Freed stage outputs gave silently wrong gradients in most runs: many repetitions, many micro-batches."""
    sizes = {**PP2, "virtual_pipeline": 2}
    ways = [[(1,) * 8], [(2, 2, 2, 2)]] * 4
    for found in groups.of(2).run(
        rank_cases.cuts, folder=models["qwen2"][0], sizes=sizes, samples=make_samples(), ways=ways
    ):
        for grads in found:
            assert max(distance(grads[n], g) for n, g in references["qwen2"]["grads"].items()) < 2e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sizes", [DP2, {**DP2, "distributed_optimizer": True}], ids=["plain", "sharded"])
def test_bad_gradient_on_one_rank_is_skipped_by_all(groups, models, sizes, value):
    """B26: nan or inf on one of two data-parallel ranks."""
    ranks = groups.of(2).run(
        rank_cases.bad_gradient,
        folder=models["qwen2"][0],
        sizes={**sizes, "lr_warmup_steps": 4},
        samples=make_samples(),
        bad_rank=1,
        value=value,
        name="decoder.layers.1.self_attention.linear_proj.weight",
    )
    for r in ranks:
        assert r["applied"] == (False, True)
        assert r["bad"] == "model.layers.1.self_attn.o_proj.weight"
        assert r["norm_is_nan"] and r["unchanged"] and r["finite_after"]
        assert r["lr"][0] == r["lr"][1], "a skipped step does not advance the schedule"


def test_a_bad_gradient_of_grouped_experts_is_said_of_its_expert(groups, models):
    ranks = groups.of(2).run(
        rank_cases.bad_gradient,
        folder=models["qwen3_moe"][0],
        sizes={**DP2, "expert_parallel": 2, "moe_grouped_gemm": True},
        samples=make_samples(),
        bad_rank=1,
        value=float("nan"),
        name="decoder.layers.1.mlp.experts.weight1",
    )
    for r in ranks:
        assert r["applied"] == (False, True) and r["unchanged"]
        assert r["bad"] == "model.layers.1.mlp.experts.3.gate_proj.weight"
