"""Every candidate can be cut, fits memory and leaves devices to the other side; what is left out is counted."""

from __future__ import annotations

from collections import Counter

import pytest

from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel, check_rollout, check_train
from mindspeed_asyncflow.planner.candidates import Candidates, divisors
from mindspeed_asyncflow.planner.memory import usable_bytes
from mindspeed_asyncflow.planner.workload import Workload
from tests.planner.models import MOE, QWEN_7B, SMALL, configuration, work


def found(model, devices: int, *overrides: str) -> Candidates:
    config = configuration(f"cluster.devices={devices}", *overrides)
    return Candidates(config, work(model), Workload.of(config), devices)


def test_divisors_are_complete_and_ascend():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(1) == [1]


@pytest.mark.parametrize("model", [QWEN_7B, MOE], ids=["dense", "experts"])
def test_every_way_of_the_trainer_is_legal_and_fits(model):
    candidates = found(model, 16, "workflow.groups_per_step=12")
    sides = list(candidates.trainers())
    assert sides
    for side in sides:
        t = side.config.trainer
        check_train(candidates.work.shape, TrainParallel.of(t))
        assert t.world_size == side.devices < 16
        assert 12 % t.data_parallel == 0
        assert t.micro_batch_tokens >= 512 + 4096
        assert t.sequence_parallel == (t.tensor_parallel > 1)
        assert sum(side.memory.values()) <= usable_bytes(side.config)
    assert {s.config.trainer.tensor_parallel for s in sides} >= {1, 2, 4}
    assert {s.config.trainer.expert_parallel for s in sides} >= ({1, 2, 4} if model is MOE else {1})


def test_what_does_not_fit_is_counted_by_reason():
    candidates = found(QWEN_7B, 2, "cluster.memory_gb=30")
    assert not list(candidates.trainers())
    assert candidates.rejected["memory"] > 0 and candidates.rejected["devices"] > 0


def test_replicas_use_what_the_trainer_leaves_and_lie_in_one_node():
    candidates = found(SMALL, 16, "cluster.devices_per_node=4", "workflow.groups_per_step=64")
    replicas = {s.config.rollout.tensor_parallel: s.config.rollout.replicas for s in candidates.rollouts(6)}
    assert replicas == {1: 10, 2: 5, 4: 2}  # devices 6 and 7 are too few for a replica of 4
    for side in candidates.rollouts(6):
        check_rollout(candidates.work.shape, RolloutParallel(tensor=side.config.rollout.tensor_parallel))


def test_replicas_that_no_group_is_left_for_are_not_started():
    candidates = found(SMALL, 16, "workflow.groups_per_step=2", "workflow.max_lag=1")
    assert {s.config.rollout.replicas for s in candidates.rollouts(1) if s.config.rollout.tensor_parallel == 1} == {
        2,
        4,
    }


def test_the_cache_takes_what_weights_leave_and_limits_the_answers():
    wide = found(QWEN_7B, 16, "workflow.groups_per_step=64", "algorithm.group_size=16")
    narrow = found(QWEN_7B, 16, "workflow.groups_per_step=64", "algorithm.group_size=16", "cluster.memory_gb=20")
    by_size = [{s.config.rollout.tensor_parallel: s.config.rollout for s in c.rollouts(8)} for c in (wide, narrow)]
    assert by_size[0][1].max_running == 128  # a step's share of 8 replicas
    assert by_size[1][1].max_running < 128
    for side in narrow.rollouts(8):
        assert sum(side.memory.values()) <= usable_bytes(side.config)


def test_a_model_that_does_not_fit_one_device_gets_larger_replicas():
    candidates = found(QWEN_7B, 16, "cluster.memory_gb=12")
    assert {s.config.rollout.tensor_parallel for s in candidates.rollouts(8)} == {2, 4}
    assert candidates.rejected == Counter(memory=1, divisibility=2)  # 8 and 16 do not divide 28 heads


def test_taking_turns_uses_all_devices_for_both_sides():
    candidates = found(SMALL, 8, "workflow.schedule=colocated", "workflow.max_lag=0", "workflow.groups_per_step=16")
    assert {side.devices for side in candidates.trainers()} == {8}
    assert {s.devices for s in candidates.rollouts(8)} == {8}


def test_a_reference_keeps_a_device_for_itself():
    candidates = found(SMALL, 4, "algorithm.kl_coef=0.1", "workflow.groups_per_step=8")
    assert max(side.devices for side in candidates.trainers()) == 2
    assert max(s.devices for s in candidates.rollouts(1)) == 2


def test_lent_devices_hold_replicas_too():
    apart, lent = (
        found(SMALL, 8, "workflow.groups_per_step=64", f"workflow.lend={lend}") for lend in ("false", "true")
    )
    most = [max(s.config.rollout.replicas for s in c.rollouts(4)) for c in (apart, lent)]
    assert most == [4, 8]


def test_a_replica_lies_in_one_node():
    candidates = found(QWEN_7B, 16, "cluster.devices_per_node=2", "workflow.groups_per_step=64")
    assert {side.config.rollout.tensor_parallel for side in candidates.rollouts(4)} == {1, 2}
    assert candidates.rejected["devices"] > 0
