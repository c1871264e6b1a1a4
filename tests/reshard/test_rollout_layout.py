import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import RolloutParallel
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.reshard.rollout_layout import rollout_layout
from tests.reshard.models import DEEPSEEK, FAMILIES, QWEN2, QWEN2_FEW_KV, QWEN2_TIED, QWEN3_MOE


def box_of(layout, rank, name):
    return next((p.segments[0].box for p in layout.ranks[rank] if p.name == name), None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "parallel", [RolloutParallel(), RolloutParallel(tensor=4, replicas=2), RolloutParallel(tensor=2, data=2)], ids=str
)
def test_every_replica_covers_the_whole_model(family, parallel):
    layout = rollout_layout(describe(FAMILIES[family]), parallel)
    layout.check_coverage()
    assert layout.world_size == parallel.world_size
    per_replica = parallel.world_size // parallel.replicas
    assert layout.ranks[:per_replica] == layout.ranks[-per_replica:]


def test_key_value_heads_are_repeated_over_neighbouring_ranks():
    """B70: rollout TP4 with 2 heads: head 0 on ranks 0 and 1, head 1 on ranks 2 and 3."""
    layout = rollout_layout(describe(QWEN2_FEW_KV), RolloutParallel(tensor=4))
    rows = [box_of(layout, r, "model.layers.1.self_attn.v_proj.weight")[:2] for r in range(4)]
    assert rows == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_whole_experts_are_dealt_in_blocks_and_the_first_ranks_take_one_more():
    layout = rollout_layout(describe(QWEN3_MOE), RolloutParallel(data=3, expert=True))
    owned = [
        sorted({int(p.name.split(".")[5]) for p in params if ".experts." in p.name and ".layers.0." in p.name})
        for params in layout.ranks
    ]
    assert owned == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_without_expert_parallel_their_width_is_cut_over_all_ranks_of_a_replica():
    layout = rollout_layout(describe(QWEN3_MOE), RolloutParallel(tensor=2, data=2))
    boxes = [box_of(layout, r, "model.layers.0.mlp.experts.5.down_proj.weight") for r in range(4)]
    assert [(b.c0, b.c1) for b in boxes] == [(0, 4), (4, 8), (8, 12), (12, 16)]


@pytest.mark.parametrize(
    ("config", "parallel", "says"),
    [
        (QWEN2, RolloutParallel(tensor=3), "tensor_parallel=3.*2 or 4"),
        (QWEN2 | dict(num_attention_heads=12), RolloutParallel(tensor=6), r"key/value heads \(4\); nearest legal: 4"),
        (QWEN2, RolloutParallel(data=2, expert=True), "the model has none"),
        (QWEN3_MOE, RolloutParallel(data=3), r"data=3 .*model's expert width.*2 or 4"),
        (QWEN3_MOE, RolloutParallel(tensor=2, data=8, expert=True), "more than the 8 experts; nearest legal: 4"),
    ],
)
def test_illegal_sizes_are_refused_with_the_reason_and_the_nearest_legal_ones(config, parallel, says):
    with pytest.raises(ConfigError, match=says):
        rollout_layout(describe(config), parallel)


@pytest.mark.slow
def test_slices_are_those_that_vllms_own_layers_keep():
    """vLLM's linear, vocabulary and expert-placement code, asked for every rank, without an engine."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    odd_vocabulary = QWEN2_TIED | dict(tie_word_embeddings=False)
    cases = [(QWEN2, 2), (QWEN2, 4), (QWEN2_FEW_KV, 4), (QWEN2_FEW_KV, 8), (odd_vocabulary, 4)]
    models = [describe(config) for config, _ in cases]
    names = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    dense = [dict(tensor=size) | {n: getattr(m, n) for n in names} for m, (_, size) in zip(models, cases)]
    experts = [(8, 3), (8, 8), (8, 5)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "vllm_slices.py")],
        input=json.dumps({"dense": dense, "experts": experts}),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    answers = iter(theirs["dense"])
    for model, (_, size) in zip(models, cases):
        layout = rollout_layout(model, RolloutParallel(tensor=size))
        for rank in range(size):
            for name, (shape, first, last) in next(answers).items():
                full = next(t for n, t in layout.tensors.items() if f"{name}.weight" in n)
                box = box_of(layout, rank, full.name)
                cols = full.shape[1]
                assert shape == [box.rows, box.cols], (name, rank)
                assert (first, last) == (box.r0 * cols + box.c0, (box.r1 - 1) * cols + box.c1 - 1), (name, rank)
    maps = iter(theirs["experts"])
    for _, size in experts:
        layout = rollout_layout(describe(QWEN3_MOE), RolloutParallel(data=size, expert=True))
        for params in layout.ranks:
            owned = sorted({int(p.name.split(".")[5]) for p in params if ".layers.0.mlp.experts." in p.name})
            assert owned == next(maps)


def test_latent_attention_keeps_its_down_projections_whole_on_every_rank():
    layout = rollout_layout(describe(DEEPSEEK), RolloutParallel(tensor=4))
    prefix = "model.layers.0.self_attn."
    assert {box_of(layout, r, f"{prefix}kv_a_proj_with_mqa.weight") for r in range(4)} == {(0, 12, 0, 32)}
    assert [box_of(layout, r, f"{prefix}kv_b_proj.weight")[:2] for r in range(4)] == [
        (0, 32),
        (32, 64),
        (64, 96),
        (96, 128),
    ]
