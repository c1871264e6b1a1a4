"""benchmarks/kernels.py ends with one JSON object, and its figures keep their goals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_reaches_its_goals(tools):
    command = [sys.executable, "benchmarks/kernels.py", "--rows", "96", "--platform", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["gate_passed"] and found["npu"] is None
    assert 0 < found["max_abs_logprob_error"] < 3e-5 and 0 < found["max_abs_entropy_error"] < 3e-5
    assert 0 < found["peak_bytes_over_torch"] <= 0.35
    assert 0.2 < found["ub_share_910b"] <= 0.9 and 0.2 < found["ub_share_910c"] <= 0.9
    assert 0 < found["cpu_time_over_torch"] < 1
