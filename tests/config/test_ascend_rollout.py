"""Settings of NPU replicas: a section inside a section, and options that give wrong results are refused."""

import pytest

from mindspeed_asyncflow.config import dump_resolved, parse_config
from mindspeed_asyncflow.config.keys import all_paths, is_open_mapping, nearest
from mindspeed_asyncflow.config.rules_unused import rules
from mindspeed_asyncflow.errors import ConfigError

GIVEN = """
rollout:
  replicas: 2
  ascend:
    graphs: true
    additional: {enable_cpu_binding: false, rl_config: {enabled: true}}
  threads: 2
"""


def test_a_section_inside_a_section_is_read_set_and_written_back():
    config = parse_config(GIVEN, ["rollout.ascend.hccl_buffer_mb=300"])
    assert (config.rollout.ascend.graphs, config.rollout.ascend.hccl_buffer_mb, config.rollout.threads) == (
        True,
        300,
        2,
    )
    text = dump_resolved(config)
    assert "\n    hccl_buffer_mb: 300 " in text
    assert parse_config(text) == config


def test_keys_inside_it_are_documented_and_found_by_their_name():
    assert "rollout.ascend.expert_parallel" in all_paths() and "rollout.ascend" not in all_paths()
    assert is_open_mapping("rollout.ascend.additional") and not is_open_mapping("rollout.ascend")
    assert nearest("rollout.ascend.graph") == "rollout.ascend.graphs"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            "rollout: {ascend: {graph: true}}",
            "rollout.ascend.graph is not a setting; did you mean rollout.ascend.graphs",
        ),
        ("rollout:\n  ascend:\n    graphs: 3", "line 3: rollout.ascend.graphs = 3: must be a valid boolean"),
        (
            "rollout: {ascend: {hccl_buffer_mb: 0}}",
            "rollout.ascend.hccl_buffer_mb = 0: must be greater than or equal to 1",
        ),
        ("rollout: {ascend: 3}", "rollout.ascend = 3"),
    ],
)
def test_mistakes_inside_it_name_the_whole_key(settings, said):
    with pytest.raises(ConfigError) as error:
        parse_config(settings)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("weight_nz_mode: 1", "weight_nz_mode must stay off"),
        ("enable_fused_mc2: 1", "enable_fused_mc2 must stay off"),
        ("enable_reduce_sample: true", "over a part of the vocabulary"),
        ("eplb_config: {dynamic_eplb: true}", "dynamic_eplb must stay off"),
        ("eplb_config: {expert_map_record_path: /x/a.json}", "expert_map_record_path must stay off"),
        ("eplb_config: {expert_map_record_path: ''}", "expert_map_record_path must stay off"),
        ("xlite_graph_config: {enabled: true}", "xlite_graph_config.enabled must stay off"),
    ],
)
def test_options_that_give_wrong_weights_or_log_probabilities_are_refused(option, said):
    """Known issues 1, 4, 5 and 10."""
    with pytest.raises(ConfigError) as error:
        parse_config(f"rollout: {{ascend: {{additional: {{{option}}}}}}}")
    assert "rollout.ascend.additional = " in str(error.value) and said in str(error.value)
    name = option.partition(":")[0]
    parse_config(f"rollout: {{ascend: {{additional: {{{name}: 0}}}}}}")


def test_experts_at_rest_are_no_experts_that_move():
    parse_config("rollout: {ascend: {additional: {eplb_config: {dynamic_eplb: false, expert_map_record_path: null}}}}")


def test_on_cpu_and_with_other_engines_a_change_is_named_as_without_use():
    def warned(**sections):
        config = parse_config("rollout: {ascend: {graphs: true}}").model_copy(update=sections)
        return {key for level, names, _ in rules(config) if level == "warning" for key in names}

    config = parse_config("{}")
    on_cpu = config.run.model_copy(update={"platform": "cpu"})
    on_npu = config.run.model_copy(update={"platform": "npu"})
    assert warned(run=on_cpu) == {"rollout.ascend.graphs", "run.platform"}
    assert warned(run=on_npu) == set()
