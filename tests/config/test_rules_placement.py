"""Settings of the two sides' environments."""

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.rules_placement import rules


def found(*settings):
    return [(level, *keys) for level, keys, _ in rules(parse_config("", settings))]


COLOCATED = "workflow.schedule=colocated"


def test_replicas_in_the_trainers_process_cannot_have_another_python():
    here = (COLOCATED, "rollout.engine=reference")
    keys = ("placement.rollout_python", "placement.trainer_python")
    assert found(*here, "placement.rollout_python=p") == [("error", *keys)]
    assert found(*here, "placement.rollout_python=p", "placement.trainer_python=p") == []
    assert found(*here, "placement.rollout_env={A: b}") == [("error", "placement.rollout_env")]
    assert found(COLOCATED, "placement.rollout_python=p", "placement.rollout_env={A: b}") == []


@pytest.mark.parametrize("sharing", [COLOCATED, "workflow.lend=true"])
def test_replicas_that_sleep_cannot_have_growing_segments(sharing):
    key = "placement.rollout_expandable_segments"
    assert found(sharing, f"{key}=true") == [("error", key)]
    assert found(sharing) == found(sharing, f"{key}=false") == found(f"{key}=true") == []


def test_port_ranges_are_warned_of_where_mc2_operators_take_none():
    a2 = ("cluster.preset=ascend_910b", "rollout.ascend.expert_parallel=true")
    assert found(*a2) == [("warning", "placement.hccl_ports", "rollout.ascend.expert_parallel")]
    assert found(*a2, "placement.hccl_ports=base_port") == found(a2[0]) == found(a2[1]) == []


def test_a_name_that_is_none_of_a_variable_is_refused():
    assert found("placement.trainer_env={'A B': c}") == [("error", "placement.trainer_env")]
