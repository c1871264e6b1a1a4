"""What `asyncflow check` says of the Ascend software and devices of a node, from what was seen there."""

import os
import socket
import time
from dataclasses import replace

import pytest

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.cli import ascend, environments, preflight
from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.machine import Machine
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.npu_smi import Chip, Report
from mindspeed_asyncflow.platforms.pythons import Environment

TRAINER = {
    "torch": "2.7.1",
    "torch_npu": "2.7.1.post8",
    "mindspeed": "0.16.0",
    "megatron-core": "0.16.1",
    "triton-ascend": "3.2.1",
    "scipy": "1.15.0",
}
T, R = "placement.trainer_python", "placement.rollout_python"
ROLLOUT = {"torch": "2.10.0", "torch_npu": "2.10.0.post4", "vllm": "0.23.0", "vllm-ascend": "0.23.0", "ray": "2.60.0"}
CHIPS = tuple(Chip(number, number // 2, "Ascend910", "OK", 3100, 65536) for number in range(16))
NODE = ascend.Node(
    cann="9.1.0",
    cann_installed="9.1.0",
    driver="25.5.2",
    devices=Report("25.5.2", CHIPS),
    environments={"trainer": Environment("3.11.9", TRAINER), "rollout": Environment("3.11.9", ROLLOUT)},
)
MACHINE = Machine(96, 16, 2 << 40, 2 << 40, 1 << 40, 1 << 40)


def config_of(*overrides):
    return parse_config("", ["run.platform=npu", "model.dtype=bfloat16", *overrides])


def found(node=NODE, machine=MACHINE, *overrides):
    return [(f.level, f.keys[0], f.message) for f in ascend.findings(config_of(*overrides), machine, node)]


def with_side(side, **versions):
    """The node with other versions in one environment; None: not there."""
    environment = NODE.environments[side]
    python = versions.pop("python", environment.python)
    changed = {name.replace("__", "-"): version for name, version in versions.items()}
    merged = {name: v for name, v in {**environment.versions, **changed}.items() if v is not None}
    return replace(NODE, environments={**NODE.environments, side: Environment(python, merged)})


def test_a_node_of_the_supported_pair_of_environments_has_no_finding():
    assert found() == []


@pytest.mark.parametrize(
    ("node", "level", "key", "said"),
    [
        (replace(NODE, cann="", cann_installed="9.1.0"), "error", "run.platform", "CANN 9.1.0 is installed here"),
        (replace(NODE, cann="", cann_installed=""), "error", "run.platform", "CANN is not found: install its toolkit"),
        (replace(NODE, cann="9.9.0"), "warning", "run.platform", "none of those"),
        (with_side("trainer", mindspeed=None), "error", T, "install_mindspeed.sh"),
        (with_side("trainer", torch_npu=None), "error", T, "2.7.1.post8, 2.9.0.post6"),
        (with_side("trainer", torch="2.10.0"), "error", T, "loads with torch 2.7.1 only"),
        (
            with_side("trainer", torch_npu="2.7.1.post2"),
            "warning",
            T,
            "older than 2.7.1.post8",
        ),
        (with_side("trainer", megatron__core="0.14.0"), "error", T, "0.16 (MindSpeed core_r"),
        (with_side("trainer", scipy=None, triton__ascend=None), "error", T, "imports triton-ascend and scipy"),
        (with_side("trainer", python="3.12.1"), "error", T, "runs on 3.10 to 3.11"),
        (with_side("rollout", vllm__ascend=None), "error", R, "vllm-ascend is not installed"),
        (with_side("rollout", vllm="0.27.1"), "error", R, "install both of one number"),
        (with_side("rollout", vllm=None), "error", R, "wants the vLLM of its own number"),
        (with_side("rollout", python="3.13.0"), "error", R, "runs on 3.10 to 3.12"),
        (
            with_side("rollout", vllm__ascend="0.17.0", vllm="0.17.0"),
            "error",
            R,
            "0.17.0 is none",
        ),
        (
            with_side("rollout", vllm__ascend="0.25.1rc1", vllm="0.25.1"),
            "warning",
            R,
            "none of",
        ),
    ],
)
def test_software_out_of_the_matrix_is_named_with_the_environment_and_what_goes_together(node, level, key, said):
    first = found(node)[0]
    assert first[:2] == (level, key) and said in first[2]


def test_a_torch_npu_without_a_build_for_the_toolkit_is_refused():
    said = found(replace(NODE, cann="8.5.0"))
    assert ("error", "placement.rollout_python") in {(level, key) for level, key, _ in said}
    assert any("2.10.0.post4 has no build for CANN 8.5.0; there are 2.7.1.post2, 2.9.0" in text for *_, text in said)


def test_one_environment_for_both_sides_is_warned_of_with_the_release_that_the_trainer_wants():
    both = Environment("3.11.9", {**TRAINER, **ROLLOUT})
    said = found(replace(NODE, environments={"trainer": both, "rollout": both}))
    assert [(level, key) for level, key, _ in said] == [("warning", "placement.trainer_python")]
    assert "MindSpeed core_r0.16.0 is released for 2.7.1.post8" in said[0][2]


def test_an_old_driver_is_refused_for_graphs_and_taken_for_eager_mode():
    old = replace(NODE, driver="25.2.0")
    assert found(old) == []
    (graphs,) = found(old, MACHINE, "rollout.ascend.graphs=true")
    assert graphs[:2] == ("error", "rollout.ascend.graphs") and "25.5.1 or newer" in graphs[2]


def test_a_python_that_does_not_answer_is_a_finding_of_its_setting():
    broken = replace(NODE, environments={**NODE.environments, "rollout": PlatformError("/usr/x/python does not exist")})
    assert found(broken) == [("error", "placement.rollout_python", "/usr/x/python does not exist")]


def test_a_python_that_rays_processes_cannot_share_is_refused_on_npus_as_on_cpus():
    seen = {**NODE.environments, "own": Environment("3.11.9", {"ray": "2.55.0"})}
    named = "placement.rollout_python=/r/bin/python"
    ((level, key, text),) = found(replace(NODE, environments=seen), MACHINE, named)
    assert (level, key) == ("error", R) and "has Ray 2.60.0, the run itself has Ray 2.55.0" in text
    alike = {**seen, "own": Environment("3.11.2", {"ray": "2.60.0"})}
    assert found(replace(NODE, environments=alike), MACHINE, named) == []
    ((_, key, text),) = found(replace(NODE, environments={**alike, "rollout": PlatformError("gone")}), MACHINE, named)
    assert (key, text) == (R, "gone")


def test_a_driver_without_a_version_is_no_matter_of_graphs_that_are_off():
    unknown = replace(NODE, driver="")
    assert [found(unknown)[0][:2]] == [("warning", "run.platform")]
    assert found(unknown, MACHINE, "rollout.ascend.graphs=true")[0][:2] == ("warning", "rollout.ascend.graphs")


def variables(environ, *overrides):
    return [(f.level, f.keys[0], f.message) for f in ascend.variable_findings(config_of(*overrides), environ)]


@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_allocator_options_that_a_side_would_refuse_at_its_start_are_refused_by_check(side):
    key, options = f"placement.{side}_expandable_segments", "PYTORCH_NPU_ALLOC_CONF: 'max_split_size_mb:100'"
    given = f"placement.{side}_env={{{options}}}"
    ((level, named, text),) = variables({}, given)
    assert (level, named) == ("error", key) and "max_split_size_mb:100, which cannot be with" in text
    assert variables({}, given, f"{key}=false") == []


def test_allocator_options_of_the_shell_count_for_every_side_whose_segments_grow():
    shell = {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:100"}
    both = ["placement.trainer_expandable_segments", "placement.rollout_expandable_segments"]
    assert [key for _, key, _ in variables(shell)] == both
    assert [key for _, key, _ in variables(shell, "workflow.schedule=colocated")] == both[:1]  # replicas sleep


@pytest.mark.parametrize("name", ["VLLM_ASCEND_ENABLE_NZ", "VLLM_ASCEND_ENABLE_FUSED_MC2", "VLLM_USE_V2_MODEL_RUNNER"])
def test_a_shell_that_switches_on_what_replicas_refuse_is_an_error(name):
    """Known issues 1 and 17."""
    ((level, key, text),) = variables({name: "1"})
    assert (level, key) == ("error", "run.platform") and text.startswith(f"{name}=1 in the environment")
    assert variables({name: "0"}) == variables({name: "1"}, "rollout.engine=reference") == []


def test_an_option_of_newer_releases_is_refused_for_the_installed_one():
    option = "rollout.ascend.additional={rl_config: {enabled: true}}"
    ((level, key, text),) = found(NODE, MACHINE, option)
    assert (level, key) == ("error", "rollout.ascend.additional") and "unknown to vllm-ascend 0.23.0" in text
    newer = with_side("rollout", vllm__ascend="0.27.1", vllm="0.27.1")
    assert "rollout.ascend.additional" not in {key for _, key, _ in found(newer, MACHINE, option)}


def test_devices_are_judged_as_far_as_the_run_may_use_them():
    ill = (*CHIPS[:7], replace(CHIPS[7], health="Alarm"), *CHIPS[8:])
    node = replace(NODE, devices=Report("25.5.2", ill))
    ((level, key, text),) = found(node)
    assert (level, key) == ("error", "run.platform") and "device 7 (card 3, Ascend910) is in health Alarm" in text
    assert found(replace(node, visible="0,1,2,3")) == []
    (wrong,) = found(replace(node, visible="0,x"))
    assert "ASCEND_RT_VISIBLE_DEVICES" in wrong[2] and "comma-separated" in wrong[2]
    (missing,) = found(replace(NODE, devices=PlatformError("npu-smi is not found: install the driver")))
    assert missing[:2] == ("error", "run.platform")


def test_a_port_range_that_is_too_small_names_what_it_must_hold():
    ((level, key, text),) = found(NODE, MACHINE, "placement.hccl_port_range=[20000, 20020]")
    assert (level, key) == ("error", "placement.hccl_port_range") and "21 ports" in text


def test_ports_of_the_plan_that_another_job_holds_are_warned_of():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first = min(port, 65000)
        said = found(NODE, MACHINE, f"placement.hccl_port_range=[{first}, {min(first + 500, 65535)}]")
    assert any(f"first {port}: another job uses them" in text for _, _, text in said)


def test_ports_that_the_kernel_gives_away_are_warned_of():
    node = replace(NODE, kernel_ports=(range(20000, 21000), ()))
    assert {level for level, *_ in found(node)} == {"warning"}
    assert any("reserve them with sysctl" in text for *_, text in found(node))


def test_devices_that_look_alike_are_shown_in_one_line():
    shown = "\n".join(ascend.lines(config_of(), NODE))
    assert "16 x Ascend910 of 65536 MiB, health OK: devices 0, 1, 2" in shown
    assert "CANN 9.1.0, driver 25.5.2" in shown and "trainer: Python 3.11.9, torch 2.7.1" in shown
    assert "relay ports: 20000-20007" in shown
    assert "HCCL groups: none" in shown
    pair = list(ascend.lines(config_of("trainer.tensor_parallel=2"), None))
    assert "HCCL trainer tensor: 1 x 2 devices inside a node, HCCS" in pair
    many = list(ascend.lines(config_of("rollout.replicas=64"), None))
    assert many[0].startswith("software and devices: assumed") and "more ranges up to" in many[-1]


@pytest.mark.slow
def test_check_shows_the_node_and_counts_its_findings(monkeypatch, capsys):
    monkeypatch.setattr(preflight, "look", lambda config, machine: NODE)
    monkeypatch.setattr(preflight, "surroundings", lambda config: replace(MACHINE, assumed=False))
    monkeypatch.setattr(Machine, "has_module", lambda self, name: True)
    assert cli.main(["check", "configs/qwen_tiny_npu.yaml"]) == 0
    out = capsys.readouterr().out
    assert "== Ascend\nCANN 9.1.0, driver 25.5.2" in out and "none: this configuration can run here" in out
    monkeypatch.setattr(preflight, "look", lambda config, machine: replace(NODE, cann=""))
    assert cli.main(["check", "configs/qwen_tiny_npu.yaml"]) == 2
    assert "error: run.platform: CANN is not found" in capsys.readouterr().out


def test_a_node_whose_tool_and_pythons_hang_is_seen_in_time(tmp_path, monkeypatch):
    for name in ("npu-smi", "python"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(environments, "PROBE_S", 0.4)
    monkeypatch.setattr(ascend.npu_smi, "TIMEOUT_S", 0.4)
    python = str(tmp_path / "python")
    start = time.monotonic()
    node = ascend.look(config_of(f"placement.trainer_python={python}", f"placement.rollout_python={python}"))
    assert time.monotonic() - start < 5
    said = {(f.keys[0], f.message) for f in ascend._devices(node)} | {("", str(node.environments["trainer"]))}
    assert all("does not answer within" in text or "did not answer within" in text for _, text in said)


def test_a_node_is_seen_through_the_programs_on_its_path(tmp_path, monkeypatch):
    table = (
        "| npu-smi 25.5.2  Version: 25.5.2 |\n| NPU Name | Health | Power |\n| Chip Phy-ID | Bus-Id | HBM-Usage(MB) |\n"
    )
    rows = "| 0 Ascend910 | OK | 160 |\n| 1 1 | 0000:9F:00.0 | 0 0 / 0 2885/ 65536 |\n"
    (tmp_path / "npu-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{table}{rows}END\n")
    (tmp_path / "npu-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    node = ascend.look(config_of())
    assert node.devices == Report("25.5.2", (Chip(1, 0, "Ascend910", "OK", 2885, 65536),))
    assert node.driver == "25.5.2" and node.visible == "1"
    assert node.environments["trainer"] == node.environments["rollout"]
    assert node.environments["trainer"].versions["torch"]
