"""Where the compilers of the kernels are, or what their absence means for a test."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS_ENV = "ASYNCFLOW_KERNEL_TOOLS"  # scripts/test.sh sets it: the tools must be there then


def tools_python(default: Path = ROOT / ".cache" / "kernel-tools") -> Path:
    """Python of the environment that scripts/kernel_tools.sh makes; skips where it was not made, and fails if it was
    promised."""
    named = os.environ.get(TOOLS_ENV)
    folder = Path(named) if named else default
    if (folder / "stamp").exists():
        return folder / "bin" / "python"
    if named:
        pytest.fail(f"{TOOLS_ENV}={named} has no complete environment: bash scripts/kernel_tools.sh")
    pytest.skip("the compilers of the kernels are not installed: bash scripts/kernel_tools.sh")
