"""The compilers that scripts/kernel_tools.sh installs, and what they make of the kernels, once per session."""

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from cann_kernels.calls import Kernels
from cann_kernels.host import host_kernels

ROOT = Path(__file__).parents[2]
TOOLS_ENV = "ASYNCFLOW_KERNEL_TOOLS"  # scripts/test.sh sets it: the tools must be there then


class Built(NamedTuple):
    status: int
    report: list[dict]
    kernels: Kernels


@pytest.fixture(scope="session")
def tools() -> Path:
    """Python of the environment with the compilers."""
    named = os.environ.get(TOOLS_ENV)
    folder = Path(named) if named else ROOT / ".cache" / "kernel-tools"
    if (folder / "stamp").exists():
        return folder / "bin" / "python"
    if named:
        pytest.fail(f"{TOOLS_ENV}={named} has no complete environment: bash scripts/kernel_tools.sh")
    pytest.skip("the compilers of the kernels are not installed: bash scripts/kernel_tools.sh")


@pytest.fixture(scope="session")
def build(tools, tmp_path_factory):
    """build(*options) -> Built"""

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
