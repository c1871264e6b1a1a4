"""The reshard benchmark: its last line follows from what was measured, and the large plan's naive bytes are counted
right."""

import sys
from pathlib import Path

import pytest

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel
from mindspeed_asyncflow.reshard.rollout_layout import rollout_layout
from mindspeed_asyncflow.reshard.train_layout import train_layout
from tests.reshard.matrix import CONFIGS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import reshard
import reshard_671b

PROMISED = [
    "configs_checked",
    "redundant_bytes_while_generating",
    "peak_over_identity",
    "bytes_over_lower_bound_max",
    "swap_over_memcpy",
    "relay_exposed_over_load",
    "naive_gather_bytes_over_ours_moe",
    "plan_671b_seconds",
    "plan_671b_modelled_transfer_s",
]


def raw(**changes):
    plan = {"apart": False, "over": 1.0, "seconds": 3.0, "modelled_s": 0.5, "naive_over_ours": 44.0}
    turn = {"redundant": 0, "peak_over_identity": 0.99}
    return {
        "matrix": {"configs": 426, "over": 1.0},
        "plans": [plan, plan | {"apart": True, "modelled_s": 20.0, "over": 1.01, "seconds": 4.0}],
        "turns": [turn, turn | {"redundant": 8, "peak_over_identity": 1.01}],
        "swap": {"over_memcpy": 0.8},
        "relay": {"exposed_over_load": 1.1},
    } | changes


def test_the_last_line_has_the_promised_keys_and_the_worst_of_each():
    found = reshard.figures(raw())
    assert list(found) == PROMISED == list(reshard.GOALS)
    assert found["redundant_bytes_while_generating"] == 8
    assert found["peak_over_identity"] == 1.01
    assert found["bytes_over_lower_bound_max"] == 1.01
    assert found["plan_671b_seconds"] == 4.0
    assert found["plan_671b_modelled_transfer_s"] == 0.5  # in place; over RDMA is in the table


@pytest.mark.parametrize("key, value, missed", [
    ("configs_checked", 59, True), ("configs_checked", 60, False), ("swap_over_memcpy", 0.69, True),
    ("redundant_bytes_while_generating", 1, True), ("naive_gather_bytes_over_ours_moe", 2.0, False),
])  # fmt: skip
def test_a_missed_goal_says_so(key, value, missed):
    assert reshard.reached(key, value).endswith("missed") == missed


def test_the_plain_allgather_brings_the_whole_model_to_every_rank():
    model = describe(CONFIGS["qwen2"])  # tied: 125 x 32 embedding, counted once
    full = sum(t.shape[0] * (t.shape[1] if len(t.shape) > 1 else 1) for t in model.tensors().values()) * 2
    target = rollout_layout(model, RolloutParallel(tensor=2))
    whole = train_layout(model, TrainParallel(data=2))
    assert reshard_671b.naive_bytes(model, whole, target, 0) == 0
    assert reshard_671b.naive_bytes(model, whole, target, 2) == 2 * full
    halves = train_layout(model, TrainParallel(tensor=2))
    held = sum(s.box.size for p in halves.ranks[0] for s in p.segments) * 2
    other = sum(s.box.size for p in halves.ranks[1] for s in p.segments) * 2
    assert reshard_671b.naive_bytes(model, halves, target, 0) == 2 * full - held - other
