"""What each process of a run is started with."""

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.rules_placement import rules
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.service.sides import Sides

PLACES = ("placement.trainer_python=/t/bin/python", "placement.rollout_python=/r/bin/python")
ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"


def sides(*settings, npu=True, present=()):
    return Sides(parse_config("", settings), npu, dict(present))


def test_trainers_critics_and_references_have_one_python_replicas_the_other():
    both = sides(*PLACES)
    assert {side["python"] for side in (both.trainer(), both.critic(), both.reference())} == {"/t/bin/python"}
    assert both.replica(0)["python"] == both.replica(0, sleeps=True)["python"] == "/r/bin/python"
    assert sides().trainer()["python"] == sides().replica(0)["python"] == ""


def test_without_npus_only_the_variables_of_the_settings_are_given():
    found = sides("placement.trainer_env={A: '1'}", "placement.rollout_env={B: '2'}", npu=False)
    assert found.trainer()["environment"] == found.critic()["environment"] == {"A": "1"}
    assert found.replica(0)["environment"] == {"B": "2"} and found.relay() == range(1)


def test_on_npus_no_two_groups_are_told_the_same_port():
    """B92: two engines on one node"""
    found = sides("rollout.replicas=3", "algorithm.advantage=gae")
    told = [found.trainer(), found.critic(), *(found.replica(i) for i in range(3))]
    for name in ("HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"):
        assert len({one["environment"][name] for one in told}) == 5, name
    assert len({one["environment"]["VLLM_PORT"] for one in told[2:]}) == 3
    assert not set(found.relay()) & {int(one["environment"]["HCCL_IF_BASE_PORT"]) for one in told}
    assert "HCCL_IF_BASE_PORT" not in found.reference()["environment"]  # it has no device


def test_segments_grow_on_each_side_as_set_and_never_where_a_replica_sleeps():
    found = sides("rollout.replicas=2")
    assert found.trainer()["environment"][ALLOCATOR] == "expandable_segments:True"
    assert found.replica(0)["environment"][ALLOCATOR] == "expandable_segments:True"
    assert found.replica(1, sleeps=True)["environment"][ALLOCATOR] == "expandable_segments:False"
    found = sides("placement.trainer_expandable_segments=false", "placement.rollout_expandable_segments=false")
    assert found.trainer()["environment"][ALLOCATOR] == "expandable_segments:False"
    assert found.replica(0)["environment"][ALLOCATOR] == "expandable_segments:False"


def test_options_of_the_shell_and_of_the_settings_stay_beside_ours():
    found = sides("placement.rollout_env={PYTORCH_NPU_ALLOC_CONF: 'page_size:1g'}", present={ALLOCATOR: "a:1"}.items())
    assert found.trainer()["environment"][ALLOCATOR] == "a:1,expandable_segments:True"
    assert found.replica(0)["environment"][ALLOCATOR] == "page_size:1g,expandable_segments:True"


def test_ports_of_the_shell_are_not_used_which_is_said(caplog):
    found = sides(present={"HCCL_IF_BASE_PORT": "61000"}.items())
    assert "HCCL_IF_BASE_PORT=61000 of the shell is not used: placement.hccl_ports" in caplog.text
    assert found.trainer()["environment"]["HCCL_IF_BASE_PORT"] != "61000"


def test_what_the_program_sets_is_what_variables_of_a_side_may_not_name():
    """So a port plan is whole: no setting takes a group's ports for another's."""
    plan = sides("workflow.lend=true", "workflow.schedule=separated")
    for side, told in (("trainer", plan.trainer()), ("rollout", plan.replica(0))):
        names = {*told["environment"]} - {ALLOCATOR}
        assert len(names) >= 3
        for name in names:
            config = parse_config("", [f"placement.{side}_env={{{name}: '1'}}"])
            assert [level for level, keys, _ in rules(config) if keys[0] == f"placement.{side}_env"] == ["error"], name


def test_what_cannot_work_is_refused_before_anything_starts():
    with pytest.raises(PlatformError, match=r"placement\.hccl_port_range=\[20000, 20050\]"):
        sides("placement.hccl_port_range=[20000, 20050]")
    with pytest.raises(PlatformError, match=r"placement\.trainer_expandable_segments"):
        sides(present={ALLOCATOR: "max_split_size_mb:64"}.items()).trainer()
