"""Whole runs of PPO: real Ray, real processes, a critic with ranks of its own."""

import json
import math
import subprocess
import sys

import pytest
from safetensors.numpy import load_file

from mindspeed_asyncflow.observe.checkpoints import read_manifest
from tests.service.test_launch import ROOT, Job, balanced, finished

pytestmark = pytest.mark.slow

PPO = ROOT / "configs" / "debug" / "ppo_critic.yaml"
SHORT = ["workflow.groups_per_step=8", "evaluation.prompts=0"]


def metrics(job):
    return [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]


def test_without_lag_a_seed_repeats_a_run_of_ppo_and_its_policy_can_be_replayed(tmp_path):
    """The second run and the replay have the bits of the first: weights, and what the critic has learnt."""
    settings = [*SHORT, "trainer.steps=3", "workflow.max_lag=0", "algorithm.group_size=2"]
    jobs = [Job(tmp_path / name, PPO, *settings) for name in ("first", "second")]
    assert all(balanced(finished(job)) for job in jobs)
    first, second = (load_file(job.folder / "hf" / "model.safetensors") for job in jobs)
    assert all((first[name] == second[name]).all() for name in first)
    of_critic = [[{k: v for k, v in row.items() if k.startswith("critic/")} for row in metrics(job)] for job in jobs]
    assert of_critic[0] == of_critic[1] and len(of_critic[0]) == 3
    replay = [sys.executable, "-m", "mindspeed_asyncflow", "replay", str(jobs[0].folder)]
    done = subprocess.run(replay, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_critic_of_several_ranks_learns_beside_the_trainer_and_is_saved(tmp_path):
    """One answer per prompt, data parallel, with lag; the first step moves the critic alone."""
    job = Job(
        tmp_path / "runs", PPO, "workflow.groups_per_step=16", "evaluation.prompts=0", "trainer.steps=4",
        "trainer.data_parallel=2", "algorithm.group_size=1", "critic.warmup_steps=1",
    )  # fmt: skip
    summary = finished(job)
    assert balanced(summary) and summary["steps"] == 4 and summary["skipped_steps"] == 0
    rows = metrics(job)
    wanted = ("vf_loss", "vf_clipfrac", "values_mean", "returns_mean", "grad_norm", "lr", "tokens_count")
    assert all(math.isfinite(row[f"critic/{name}"]) for row in rows for name in wanted)
    assert all(row["critic/grad_norm"] > 0 for row in rows)
    assert [row["actor/grad_norm"] > 0 for row in rows] == [False, True, True, True]
    (saved,) = (job.folder / "checkpoints").glob("step_*")
    shards = [file.name for file in read_manifest(saved).files if file.name.endswith(".safetensors")]
    assert [sum(name.startswith(f"{side}/") for name in shards) for side in ("trainer", "critic")] == [2, 2]
    assert job.leftovers() == []
