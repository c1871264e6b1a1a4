"""The second Python environment, with another torch and another numpy than this one."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def second_python():
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "second_environment.sh"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
