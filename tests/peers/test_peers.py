"""Losses, gradients and advantages against verl 0.9.1 and TRL 1.16.0 under the settings of docs/algorithms.md.

They run in an environment of their own, which `bash scripts/peers.sh` makes; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".cache" / "peers" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / ".cache" / "peers" / "stamp").exists(), reason="no verl and TRL: bash scripts/peers.sh"
    ),
]


def differences(module: str) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, "-m", module], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("module", "cases"), [("tests.peers.with_verl", 66), ("tests.peers.with_trl", 18)])
def test_losses_gradients_and_advantages_are_the_peers(module, cases):
    found = differences(module)
    assert found.pop("control") > 1e-3  # of one setting that is not the peer's
    assert len(found) >= cases
    assert {name: value for name, value in found.items() if not value < 1e-6} == {}
