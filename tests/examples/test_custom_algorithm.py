"""The example of an algorithm of one's own: a whole run through HTTP that learns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_asyncflow.cli.audit import audit_run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_algorithm.py"


def test_it_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.slow
def test_a_run_whose_prompts_rewards_and_advantages_come_by_http_learns_and_loses_nothing(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--steps", "30", "--set", f"run.folder={tmp_path}"]
    command += ["--set", "evaluation.prompts=100", "--set", f"model.cache={ROOT / '.cache' / 'models'}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "latest" / "summary.json").read_text())
    assert summary["steps"] == 30 and summary["max_lag"] <= 1
    assert summary["reward_last"] > summary["reward_first"] + 0.4  # of 2
    assert summary["heldout_greedy"] > summary["heldout_first"] + 0.15
    found = audit_run(tmp_path / "latest")
    assert found.holds and found.trained == 30 * 32 * 8 and not found.open
