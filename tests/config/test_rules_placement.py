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


@pytest.mark.parametrize(
    ("side", "variable", "other"),
    [
        ("trainer", "HCCL_IF_BASE_PORT: '1'", "placement.hccl_ports"),
        ("rollout", "HCCL_HOST_SOCKET_PORT_RANGE: 5-9", "placement.hccl_ports"),
        ("trainer", "PYTORCH_NPU_ALLOC_CONF: 'a:1,expandable_segments:False'", "placement.trainer_expandable_segments"),
        ("rollout", "PYTORCH_ALLOC_CONF: 'expandable_segments:True'", "placement.rollout_expandable_segments"),
        ("rollout", "HCCL_BUFFSIZE: '300'", "rollout.ascend.hccl_buffer_mb"),
        ("rollout", "OMP_NUM_THREADS: '3'", "rollout.threads"),
    ],
)
def test_a_variable_that_a_setting_sets_is_refused_with_that_setting(side, variable, other):
    ((level, key, named, *_),) = found(f"placement.{side}_env={{{variable}}}")
    assert (level, key, named) == ("error", f"placement.{side}_env", other)


@pytest.mark.parametrize("name", ["ASCEND_RT_VISIBLE_DEVICES", "VLLM_ASCEND_ENABLE_NZ", "EXPERT_MAP_RECORD"])
def test_a_variable_that_has_one_right_value_is_refused_for_replicas(name):
    assert found(f"placement.rollout_env={{{name}: '1'}}") == [("error", "placement.rollout_env")]


def test_variables_that_the_program_leaves_alone_are_taken():
    given = "{HCCL_BUFFSIZE: '300', PYTORCH_NPU_ALLOC_CONF: 'page_size:1g', VLLM_LOGGING_LEVEL: INFO}"
    assert found(f"placement.trainer_env={given}") == []
    assert found("rollout.engine=reference", "placement.rollout_env={OMP_NUM_THREADS: '3'}") == []


@pytest.mark.parametrize("sharing", [COLOCATED, "workflow.lend=true"])
def test_experts_spread_over_devices_are_refused_where_replicas_sleep(sharing):
    """Known issue 4."""
    experts = ("rollout.ascend.expert_parallel=true", sharing)
    other = "workflow.lend" if "lend" in sharing else "workflow.schedule"
    assert found(*experts) == [("error", "rollout.ascend.expert_parallel", other)]
    assert found(experts[0]) == found(*experts, "run.platform=cpu") == []
