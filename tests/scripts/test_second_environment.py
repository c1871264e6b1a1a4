"""The second environment's script: what it says where it cannot work."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "second_environment.sh"


def test_without_the_first_environment_it_says_how_to_make_it(tmp_path):
    (tmp_path / "scripts" / "requirements").mkdir(parents=True)
    for name in ("second_environment.sh", "absent_libraries.py", "requirements/second.txt"):
        (tmp_path / "scripts" / name).write_text((SCRIPT.parent / name).read_text())
    done = subprocess.run(
        ["bash", tmp_path / "scripts" / SCRIPT.name],
        env={k: v for k, v in os.environ.items() if k != "ASYNCFLOW_VENV"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "bootstrap.sh dev" in done.stderr
    assert not (tmp_path / ".cache" / "second").exists()
