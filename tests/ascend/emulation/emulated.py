"""Where the emulation and the real MindSpeed are, and the environment of processes that use them.

The emulated `torch_npu` comes from a folder on PYTHONPATH; nothing in the package knows of it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LIBRARY = HERE / "library"
SOURCE_ENV = "ASYNCFLOW_MINDSPEED_SRC"


def mindspeed_source() -> Path | None:
    """The clone of MindSpeed that the environment names; None where there is none."""
    folder = os.environ.get(SOURCE_ENV)
    return Path(folder) if folder and (Path(folder) / "mindspeed" / "megatron_adaptor.py").is_file() else None


needs_mindspeed = pytest.mark.skipif(
    mindspeed_source() is None,
    reason=f"MindSpeed is on no package index: clone it and name the folder in {SOURCE_ENV}",
)


def environment(emulated: bool, devices: int = 1) -> dict[str, str]:
    """Variables of a process; `emulated`: it has `devices` NPUs, and MindSpeed where that is present."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    folders = [str(ROOT)]
    if emulated:
        folders += [str(LIBRARY), *([str(mindspeed_source())] if mindspeed_source() else [])]
        found |= {"EMULATED_NPUS": str(devices), "ASYNCFLOW_KERNELS": "torch"}
    return found | {"PYTHONPATH": os.pathsep.join(folders)}


def run_python(code: str, *arguments: str, emulated: bool, devices: int = 1, timeout_s: float = 300) -> str:
    """Standard output of `code` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(emulated, devices),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
