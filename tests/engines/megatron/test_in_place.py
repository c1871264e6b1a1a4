"""Trainer and rollout engine on the same devices: real megatron ranks over gloo, a reference engine in each."""

import numpy as np
import place_cases
import pytest
from place_cases import GENERATE, TRAIN
from tiny_models import make_samples, name_of

pytestmark = pytest.mark.slow

TP2, PP2, DP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"data_parallel": 2}
SP2 = {**TP2, "sequence_parallel": True}
CASES = [
    ("qwen2", TP2, "float32"),
    ("qwen3", {**PP2, "virtual_pipeline": 2}, "float32"),
    ("qwen3", {**DP2, "distributed_optimizer": True}, "bfloat16"),
    ("qwen3_moe", {**DP2, "expert_parallel": 2}, "float32"),
    ("deepseek_v3", SP2, "float32"),
    ("deepseek_v3", {**PP2, "pipeline_layers": [1, 2]}, "bfloat16"),  # routers are float32 while generating
]
ALLOWED = {"float32": 2e-4, "bfloat16": 0.3}  # the last: two implementations round differently, layer by layer


@pytest.mark.parametrize(("kind", "sizes", "dtype"), CASES, ids=map(name_of, CASES))
def test_train_and_generate_in_turns(groups, folders, kind, sizes, dtype):
    """Same log-probs on both sides, the device to one side at a time, training as if nothing had come between."""
    for r in groups.of(2).run(
        place_cases.turns, folder=folders[kind], sizes=sizes, samples=make_samples(), dtype=dtype
    ):
        assert r["steps"] == r["plain"]
        for version, turn in enumerate(r["turns"], start=1):
            assert np.abs(turn["rollout"] - turn["trainer"]).max() < ALLOWED[dtype]
            assert np.abs(turn["sampled"] - turn["sampled by trainer"]).max() < ALLOWED[dtype]
            assert np.array_equal(turn["trainer"], turn["trainer again"])
            check_served(turn, version)
            check_books(turn)
        first, second = (turn["report"] for turn in r["turns"])
        assert first.fingerprint != second.fingerprint
        assert r["buffers made"] == r["storages"], "host buffers of the first turn are used again"


def check_served(turn, version):
    """What is served is the export, bit for bit in the types of the rollout engine, and every answer says so."""
    assert turn["report"].fingerprint == turn["exported"]
    assert all(served == ({version}, turn["exported"]) for served in turn["served"])


def check_books(turn):
    for moment in ("training", "back"):
        assert all(turn[moment][kind] == 0 for kind in (*GENERATE, "bucket")), moment
        assert all(turn[moment][kind] > 0 for kind in TRAIN), moment
    assert all(turn["generating"][kind] == 0 for kind in (*TRAIN, "bucket"))
    assert turn["generating"]["generation weights"] > 0
    assert turn["uncounted"] < 32768, "no tensor of weight escaped the books"
    assert turn["training"] == turn["back"]
    report = turn["report"]
    weights = turn["training"]["train weights"] + turn["generating"]["generation weights"]
    assert report.peak_bytes <= weights + place_cases.BUCKET_BYTES
