"""Real runs that end, however, and are started again in their folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_asyncflow import cli
from tests.service.test_launch import DEFAULT, ROOT, Job, balanced, finished, metrics

pytestmark = pytest.mark.slow
SMALL = ["workflow.groups_per_step=8", "evaluation.prompts=16", "rollout.engine=reference", "checkpoint.keep=9"]
CLOCKS = ("timing_s/", "perf/", "idle/", "time", "weight_sync/publish", "weight_sync/load_s", "dock/", "eval/seconds")


class Folder(Job):
    """`asyncflow train` in a folder that may hold a run; `how`: further arguments."""

    def __init__(self, folder, *settings, how=()):
        self.base = Path(folder)
        command = [sys.executable, "-m", "mindspeed_asyncflow", "train", str(DEFAULT), *how]
        command += [] if "--resume" in how else ["--run-folder", str(folder)]
        for setting in [*SMALL, *settings]:
            command += ["--set", setting]
        self.output = self.base.with_suffix(f".{time.monotonic_ns()}.out")
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self.output.open("w"), stderr=subprocess.STDOUT)
        self.seen = {}

    @property
    def folder(self):
        return self.base


def computed(job):
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in metrics(job)]


def samples(job):
    return {p.name: p.read_text() for p in (job.folder / "samples").iterdir()}


def contents(folder):
    """Every file with its bytes, and every link with its target."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink())
    return {str(p): os.readlink(p) if p.is_symlink() else p.read_bytes() for p in files}


def test_a_run_without_lag_that_goes_on_from_a_checkpoint_equals_the_uninterrupted_one(tmp_path, capsys):
    """B60, B62: also the rates of a schedule, and evaluations; another number of dock pairs. Complete, it stays so."""
    settings = ["workflow.max_lag=0", "trainer.steps=6", "trainer.save_every=2", "evaluation.every=3"]
    settings += ["trainer.lr_decay=linear", "trainer.lr_warmup_steps=2"]
    whole = Folder(tmp_path / "whole", *settings)
    finished(whole)
    shutil.copytree(tmp_path / "whole", tmp_path / "rest", symlinks=True)
    how = ["--resume", str(tmp_path / "rest" / "checkpoints" / "step_000004")]
    rest = Folder(tmp_path / "rest", *settings, "dock.pairs=2", how=how)
    summary = finished(rest)
    assert "going on from" in rest.text and "step 5/6" in rest.text and "step 4/6" not in rest.text
    weights = [(job.folder / "hf" / "model.safetensors").read_bytes() for job in (whole, rest)]
    assert weights[0] == weights[1]
    assert computed(rest) == computed(whole) and [row["step"] for row in metrics(rest)] == list(range(6))
    rates = [row["actor/lr"] for row in metrics(rest)]
    assert rates[1] == max(rates) and rates[2:] == sorted(rates[2:], reverse=True)
    assert samples(rest) == samples(whole) and samples(whole)
    assert summary["samples_trained"] == 6 * 64 and balanced(summary)
    versions = [json.loads(line)["version"] for line in (rest.folder / "evaluations.jsonl").read_text().splitlines()]
    assert versions == [0, 3, 6]
    assert cli.main(["audit", str(rest.folder)]) == 0, capsys.readouterr().out
    before = contents(rest.folder)
    for _ in range(3):
        again = Folder(tmp_path / "rest", *settings)
        assert again.wait() == 0 and "already complete: 6 steps are trained" in again.text
    assert contents(rest.folder) == before


def test_a_killed_driver_goes_on_with_answers_begun_before_in_other_sizes(tmp_path, capsys):
    """Two versions of lag, answers over several rounds; then two replicas, two dock pairs and two tensor ranks."""
    settings = ["workflow.max_lag=2", "workflow.keep_versions=4", "workflow.partial_rounds=3", "trainer.save_every=2"]
    settings += ["rollout.max_new_tokens=48", "rollout.temperature=10", "trainer.steps=12"]
    job = Folder(tmp_path / "run", *settings)
    job.wait_for("checkpoint of step 4")
    job.watch()
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    deadline = time.monotonic() + 60
    while job.leftovers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert job.leftovers() == []
    more = ["rollout.replicas=2", "dock.pairs=2", "trainer.tensor_parallel=2"]
    again = Folder(tmp_path / "run", *settings, *more)
    summary = finished(again)
    assert "going on from" in again.text and "step 1/12" not in again.text
    assert [row["step"] for row in metrics(again)] == list(range(12))
    assert summary["steps"] == 12 and balanced(summary) and summary["max_lag"] <= 2
    assert summary["samples_trained"] == 12 * 64
    assert cli.main(["audit", str(again.folder)]) == 0, capsys.readouterr().out
