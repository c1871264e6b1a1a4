"""benchmarks/kernels.py ends with one JSON object, and its figures keep their goals."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # torch is loaded
@pytest.mark.parametrize(
    ("words", "said"),
    [(["--platform", "npu"], "no NPU here"), (["--rows", "0"], "'0' is no number of rows from 1 on")],
)
def test_what_cannot_be_measured_is_said_before_anything_is_built(monkeypatch, capsys, words, said):
    from benchmarks import kernels

    monkeypatch.setattr(kernels, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["kernels.py", *words])
    with pytest.raises(SystemExit) as end:
        kernels.main()
    assert end.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_a_failed_set_up_of_the_compilers_is_said(monkeypatch, tmp_path):
    from benchmarks import kernels

    monkeypatch.setattr(kernels.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match="compilers could not be installed"):
        kernels.build(tmp_path)


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
