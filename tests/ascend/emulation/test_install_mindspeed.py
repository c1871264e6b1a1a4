"""scripts/install_mindspeed.sh stops before it clones when the Python it is given cannot run MindSpeed."""

import os
import re
import subprocess

import pytest
from emulated import ROOT

SCRIPT = ROOT / "scripts" / "install_mindspeed.sh"
PYTHON = """#!/usr/bin/env bash
case "$*" in
*"import torch, torch_npu"*) exit $NPU ;;
*"torch.__version__"*) echo $TORCH ;;
*megatron-core*) echo $CORE ;;
*"import triton"*) exit $TRITON ;;
*) echo "ran $*" ;;
esac
"""
FITTING = {"NPU": "0", "TORCH": "2.7.1", "CORE": "0.16.1", "TRITON": "0"}


def install(tmp_path, **state):
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    source = tmp_path / "empty"
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    places = {"ASYNCFLOW_MINDSPEED_SRC": str(source), "ASYNCFLOW_MINDSPEED_DIR": str(tmp_path / "clone")}
    environ = {**os.environ, **FITTING, **state, **places}
    return subprocess.run(["bash", str(SCRIPT), str(python)], env=environ, capture_output=True, text=True, timeout=60)


def test_its_help_says_how_to_call_it_and_looks_at_no_python():
    done = subprocess.run(["bash", str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert "install_mindspeed.sh [PYTHON]" in done.stdout and "set -euo" not in done.stdout


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"NPU": "1"}, "has no torch_npu"),
        ({"CORE": "0.12.1"}, "changes megatron-core 0.16"),
        ({"TRITON": "1"}, "has no triton"),
    ],
)
def test_an_environment_that_cannot_run_it_is_refused(tmp_path, state, says):
    done = install(tmp_path, **state)
    assert done.returncode == 2 and says in done.stderr
    assert not (tmp_path / "clone").exists()


def test_another_torch_is_said_and_a_source_without_the_commit_installs_nothing(tmp_path):
    done = install(tmp_path, TORCH="2.10.0")
    assert "released for torch 2.7.1" in done.stderr
    assert done.returncode != 0 and "ran -m pip install" not in done.stdout


def test_branch_commit_and_pair_are_those_of_the_compatibility_matrix():
    from mindspeed_asyncflow.platforms.matrix import TRAINER

    text = SCRIPT.read_text()
    assert re.search(r"^commit=[0-9a-f]{40}$", text, re.M)
    row = next(row for row in TRAINER if f"branch={row.mindspeed}" in text)
    assert f"{row.megatron_core}.*" in text and row.torch_npu in text
