"""A profile of real workers, a plan made from it, and the planned run: one after the other, as a user does it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_asyncflow.cli.profile import slowdown
from mindspeed_asyncflow.planner.fit import Fit, Point
from mindspeed_asyncflow.planner.profile import Profile

ROOT = Path(__file__).parents[2]
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
SMALL = ["workflow.groups_per_step=8", "rollout.engine=reference", "cluster.preset=cpu", "evaluation.prompts=0"]


def test_slowdown_is_measured_over_fitted_time_and_never_a_speedup():
    fit = Fit({"train_call_s": 1.0, "train_token_s": 0.1}, {})
    points = [Point("train", {"tokens": 10.0, "micro_batches": 0.0, "squares": 0.0}, 3.0)]
    fit.coefficients.update(train_micro_s=0.0, train_square_s=0.0)
    assert slowdown(points, fit) == pytest.approx(1.5)
    assert slowdown([Point("train", points[0].amounts, 1.0)], fit) == 1.0
    assert slowdown([], fit) == 1.0


def asyncflow(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mindspeed_asyncflow", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_a_profiled_plan_starts_and_trains(tmp_path, monkeypatch):
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    environment = dict(os.environ)
    settings = [f"--set={s}" for s in [*SMALL, f"run.folder={tmp_path}"]]
    kept, planned = tmp_path / "profile.json", tmp_path / "planned.yaml"
    asyncflow("profile", "configs/qwen_tiny_cpu.yaml", *settings, f"--out={kept}", environment=environment)
    profile = Profile.load(kept)
    assert {"generate", "train", "optimizer", "publish", "load", "score", "claim"} <= set(profile.errors)
    assert min(profile.slower.values()) >= 1
    assert [length for length, _ in profile.answer_bins][-1] <= 5

    options = ["--devices=2", f"--profile={kept}", f"--out={planned}"]
    said = asyncflow("plan", "configs/qwen_tiny_cpu.yaml", *settings, *options, environment=environment)
    assert "train 1 (1 rank" in said.stdout and "rollout 1 x TP1" in said.stdout

    asyncflow("check", str(planned), environment=environment)
    run = tmp_path / "run"
    asyncflow("train", str(planned), "--set=trainer.steps=3", f"--run-folder={run}", environment=environment)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
