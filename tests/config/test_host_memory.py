"""Host memory of the fullest node of a cluster, and what is said where it does not suffice."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.host_memory import findings, fullest_node, memory_bytes
from mindspeed_asyncflow.config.machine import assume
from mindspeed_asyncflow.config.model import describe
from tests.config.test_checks import BOX

MODELS = Path(__file__).parents[2] / "configs/models"
NPU = ["run.platform=npu", "model.dtype=bfloat16"]


def shape(name):
    return describe(json.loads((MODELS / name / "config.json").read_text()))


def cluster(*overrides, devices, **changes):
    config = parse_config("", [*NPU, *overrides])
    return config, replace(assume(devices, config.cluster, BOX), **changes)


SPLIT = ["trainer.data_parallel=8", "trainer.tensor_parallel=4", "rollout.replicas=4", "rollout.tensor_parallel=8"]


def test_a_node_of_replicas_holds_whole_versions_and_no_trainer():
    config, machine = cluster(*SPLIT, devices=64)
    assert fullest_node(config, machine) == (0, 2)
    model = shape("qwen2.5-7b")
    parts = memory_bytes(config, machine, model)
    assert (parts["weight relay"], parts["weight mirror"]) == (0, 4 * 2 * model.parameters)


def test_replicas_beside_the_last_trainers_are_on_their_node():
    config, machine = cluster(*SPLIT, "trainer.data_parallel=2", devices=64)
    assert fullest_node(config, machine) == (8, 1)
    parts = memory_bytes(config, machine, shape("qwen2.5-7b"))
    assert "weight mirror" not in parts  # the relay of the only node with trainers is mapped


COLOCATED = ["workflow.schedule=colocated", "workflow.max_lag=0", "rollout.replicas=4", "rollout.tensor_parallel=8"]


def test_colocated_nodes_hold_their_share_of_the_train_state_once_where_the_optimizer_is_distributed():
    sizes = [*COLOCATED, "trainer.tensor_parallel=4", "trainer.data_parallel=8"]
    kind = "train state on the host, while others have its devices"
    model = shape("qwen2.5-7b")
    for distributed, copies in ((True, 1), (False, 8)):
        config, machine = cluster(*sizes, f"trainer.distributed_optimizer={distributed}", devices=32)
        assert fullest_node(config, machine) == (16, 2)
        state = memory_bytes(config, machine, model)[kind]
        assert state == model.parameters * (8 * 2 + copies * 12) // 2


def test_expert_parallel_ranks_share_the_experts():
    sizes = [*COLOCATED, "trainer.data_parallel=32", "trainer.distributed_optimizer=true"]
    model = shape("qwen3-30b-a3b")
    kind = "train state on the host, while others have its devices"
    alone, shared = (
        memory_bytes(*cluster(*sizes, f"trainer.expert_parallel={n}", devices=32), model)[kind] for n in (1, 16)
    )
    assert alone - shared == model.expert_parameters * (32 - 2) * 2 // 2


def test_what_an_assumed_node_lacks_is_warned_of_and_what_this_machine_lacks_refused():
    model = shape("deepseek-r1")
    config, machine = cluster(*SPLIT, devices=64)
    said = list(findings(config, machine, model))
    assert [level for level, _, _ in said] == ["warning", "warning"]
    assert "a node of 4 has 2746582" in said[0][2] and "remount" not in said[1][2]  # no size of it would do
    config, machine = cluster(*SPLIT, devices=64, assumed=False)
    assert [level for level, _, _ in findings(config, machine, model)] == ["error", "error"]


def test_a_larger_shared_memory_is_proposed_where_the_node_has_it():
    config, machine = cluster(*SPLIT, "workflow.keep_versions=2", devices=64)
    large = replace(machine, shm_bytes=machine.memory_bytes // 4)
    (said,) = findings(config, large, shape("qwen3-235b-a22b"))
    assert "mount -o remount,size=1482G /dev/shm" in said[2]


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_a_reference_policy_is_kept_in_host_memory(coefficient):
    config, machine = cluster(f"algorithm.kl_coef={coefficient}", devices=2)
    parts = memory_bytes(config, machine, shape("qwen2.5-7b"))
    assert (parts.get("reference policy", 0) > 2 * 7_000_000_000) == bool(coefficient)
