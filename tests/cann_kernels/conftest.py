"""What the compilers that scripts/kernel_tools.sh installs make of the kernels, once per session."""

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from tool_place import ROOT, tools_python

from cann_kernels.calls import Kernels


class Built(NamedTuple):
    status: int
    report: list[dict]
    kernels: Kernels


@pytest.fixture(scope="session")
def tools() -> Path:
    """Python of the environment with the compilers."""
    return tools_python()


@pytest.fixture(scope="session")
def build(tools, tmp_path_factory):
    """build(*options) -> Built"""
    from cann_kernels.host import host_kernels  # needs llvmlite, which a trainer's environment may lack

    def run(*options: str) -> Built:
        folder = tmp_path_factory.mktemp("kernels")
        command = [str(tools), "-m", "cann_kernels.build", str(folder), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        report = folder / "report.json"
        assert report.exists(), done.stdout + done.stderr
        return Built(done.returncode, json.loads(report.read_text()), host_kernels(folder))

    return run


@pytest.fixture(scope="session")
def built(build) -> Built:
    return build()
