import json
from dataclasses import replace

import pytest

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.cli import preflight
from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.machine import Machine, assume, file_system
from mindspeed_asyncflow.data.char_tokenizer import make_char_tokenizer
from mindspeed_asyncflow.errors import DataError


@pytest.fixture
def folder(tmp_path):
    """A model folder as far as the tokenizer goes, and a file of 6 prompts, one of them null, one too long."""
    make_char_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("12>", None, "345>", "1" * 20, "6>", "7>")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def config_of(folder, *overrides):
    fixed = [f"data.task=file:{folder}/rows.jsonl", f"model.source={folder}/model", "data.max_prompt_tokens=16"]
    few = ["data.heldout=0", "evaluation.prompts=0", "workflow.groups_per_step=4"]
    return parse_config("", [*fixed, *few, *overrides])


def test_a_sample_shows_prompts_their_tokens_and_what_was_left_out(folder):
    first, unusable, long, *prompts = preflight.sample(config_of(folder))
    assert first == "4 prompts to train on, 0 to evaluate with, 2 to 4 tokens; 1 steps in an epoch"
    assert "1 unusable row left out" in unusable and "rows.jsonl:2: prompt is null" in unusable
    assert long == "1 prompts are longer than data.max_prompt_tokens and were dropped"
    assert prompts == ["3 tokens, answer '1': '12>'", "4 tokens, answer '1': '345>'"]


@pytest.mark.parametrize(
    ("override", "said"),
    [("workflow.groups_per_step=5", "4 usable rows < batch 5"), ("data.epochs=1", "data ends after 1 steps")],
)
def test_a_sample_refuses_what_the_run_would_refuse(folder, override, said):
    """B86, B88"""
    with pytest.raises(DataError, match=said):
        preflight.sample(config_of(folder, override))


def test_check_shows_the_data_of_the_default_task(capsys):
    assert cli.main(["check", "configs/qwen_tiny_cpu.yaml"]) == 0
    out = capsys.readouterr().out
    assert "== data\n9600 prompts to train on, 400 to evaluate with, 5 to 5 tokens" in out


def test_a_model_without_the_characters_of_a_task_is_refused_with_one_that_has_them(monkeypatch):
    class Minus:
        name = "minus"

        def problems(self, size, seed):
            from mindspeed_asyncflow.data.problem import Problem

            return [Problem("1-2=", "-1")]

        def score(self, text, truth, finished):
            return 0.0

        def demonstrate(self, problem, rng):
            return problem.truth

    monkeypatch.setattr("mindspeed_asyncflow.data.tasks._user_class", lambda *names: Minus)
    (finding,) = preflight._task_and_model(parse_config("", ["data.task=python:a:B"]))
    assert str(finding).endswith("builtin:tiny_qwen2 has no '-', which minus writes; take builtin:tiny_qwen2_sums")
    sums = parse_config("", ["data.task=python:a:B", "model.source=builtin:tiny_qwen2_sums"])
    assert preflight._task_and_model(sums) == []


NPU = "configs/qwen_tiny_npu.yaml"


@pytest.mark.slow
def test_assumed_devices_are_checked_without_any_and_at_most_so_many_may_be_wanted(capsys):
    assert cli.main(["check", NPU, "--platform", "npu", "--assume-devices", "16"]) == 0
    out = capsys.readouterr().out
    assert "1 assumed node" in out and "none: this configuration can run there" in out
    assert cli.main(["check", NPU, "--platform", "npu", "--assume-devices", "1"]) == 2
    assert "2 NPUs wanted (1 trainer ranks + 1 rollout replicas x 1), 1 available" in capsys.readouterr().out


@pytest.mark.slow
def test_the_platform_of_the_command_line_is_put_over_the_file(capsys):
    assert cli.main(["check", "configs/qwen_tiny_cpu.yaml", "--platform", "npu", "--assume-devices", "2"]) == 0
    assert "platform: npu" in capsys.readouterr().out


@pytest.mark.parametrize("devices", ["0", "-1", "many", "1.5", "\u0661"])
def test_a_number_of_devices_that_is_none_is_refused(devices, capsys):
    assert cli.main(["check", NPU, "--assume-devices", devices]) == 2
    assert "expected a whole number, 1 or more" in capsys.readouterr().err


def test_devices_cannot_be_assumed_for_a_run_on_cpus(capsys):
    assert cli.main(["check", "configs/qwen_tiny_cpu.yaml", "--platform", "cpu", "--assume-devices", "2"]) == 2
    assert "take --platform npu" in capsys.readouterr().err


def test_files_of_an_assumed_cluster_are_warned_of_and_refused_on_this_machine(tmp_path):
    sizes = preflight.SMOLLM2 | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = parse_config("", [f"model.source={tmp_path}", "data.task=file:none/*.jsonl", "run.platform=npu"])
    here = Machine(2, 2, 24 << 30, 24 << 30, 12 << 30, 50 << 30)
    there = {f.keys[0]: f for f in preflight.inspect(config, assume(2, config.cluster, here))}
    assert {key: there[key].level for key in ("data.task", "model.source")} == {
        "data.task": "warning",
        "model.source": "warning",
    }
    assert "none/*.jsonl is not complete here; every node" in str(there["data.task"])
    assert "data.task" in {f.keys[0] for f in preflight.inspect(config, here) if f.level == "error"}


def test_an_assumed_cluster_has_the_nodes_and_host_memory_of_its_preset():
    here = Machine(4, 0, 1, 1, 1, 50)
    cluster = parse_config("", ["cluster.preset=ascend_910b"]).cluster
    assumed = assume(20, cluster, here)
    assert (assumed.npus, assumed.nodes, assumed.cpus) == (20, 3, 12)
    assert assumed.memory_bytes == 3 * 1536 * 10**9
    assert assumed.port_is_free(1) and assumed.has_module("no_such_module_here")


def hosts(tmp_path, monkeypatch, text):
    (tmp_path / "hosts").write_text(text)
    monkeypatch.setenv("ASYNCFLOW_TOPOLOGY", str(tmp_path / "hosts"))
    monkeypatch.setattr(preflight, "probe", lambda folder: Machine(8, 4, 100, 50, 10, 7))


def test_a_run_over_the_hosts_of_a_launch_has_all_their_devices(tmp_path, monkeypatch):
    hosts(tmp_path, monkeypatch, "a slots=4\nb slots=2\nc\n")
    machine = preflight.surroundings(parse_config("", ["run.platform=npu"]))
    assert (machine.npus, machine.nodes, machine.cpus) == (4 + 2 + 4, 3, 24)
    assert (machine.memory_bytes, machine.free_memory_bytes, machine.shm_bytes) == (300, 150, 30)
    assert (machine.disk_bytes, machine.whole, machine.assumed) == (7, True, False)


def test_slots_of_a_launch_on_cpus_are_no_devices(tmp_path, monkeypatch):
    hosts(tmp_path, monkeypatch, "a slots=4\nb slots=4\n")
    monkeypatch.setattr(preflight, "probe", lambda folder: Machine(8, 0, 100, 50, 10, 7))
    assert preflight.surroundings(parse_config("", [])).npus == 0


def test_where_a_ray_cluster_is_joined_this_nodes_sizes_refuse_nothing(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(preflight, "probe", lambda folder: Machine(1, 0, 1, 1, 1, 1))
    config = parse_config("", ["run.platform=npu", "trainer.threads=64"])
    machine = preflight.surroundings(config)
    assert not machine.whole
    assert [f for f in preflight.inspect(config, machine) if f.level == "error" and "available" in f.message] == []
    assert [f.keys[0] for f in preflight.inspect(config, replace(machine, whole=True)) if "available" in f.message] == [
        "run.platform"
    ]


MOUNTS = "overlay / overlay rw 0 0\nnode:/x /shared nfs4 rw 0 0\n/dev/sda1 /shared/local ext4 rw 0 0\n"


def test_folders_of_a_run_over_several_nodes_must_be_shared_ones():
    places = ["model.cache=/shared/cache", "run.folder=/shared/local/runs", "model.source=/models/qwen"]
    found = {f.keys[0]: str(f) for f in preflight._shared_paths(parse_config("", places), MOUNTS)}
    assert list(found) == ["model.source", "run.folder"]
    assert "ext4, which is of this node alone" in found["run.folder"] and "take a shared" in found["run.folder"]
    assert "equal copies on every node" in found["model.source"]


def test_the_file_system_of_a_path_is_that_of_its_longest_mount():
    known = {
        "/shared/a": "nfs4",
        "/shared": "nfs4",
        "/shared/local/a/b": "ext4",
        "/sharedness": "overlay",
        "/": "overlay",
    }
    assert {path: file_system(path, MOUNTS) for path in known} == known
    assert file_system("/x", "") == ""
    assert file_system(".") != ""
