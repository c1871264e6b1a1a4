"""examples/custom_engine.py: a user's trainer and rollout engine do what those of the project do.

The stated tolerance: answers, their log-probabilities, rewards and advantages of the first step are the same, its loss
differs by at most 1e-6 and its gradient norm by 1e-5 of itself (float32; two ranks sum in another order than one).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_asyncflow.cli.preflight import inspect
from mindspeed_asyncflow.config import load_config
from mindspeed_asyncflow.config.machine import Machine
from mindspeed_asyncflow.workflow.sample_log import read_step

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "qwen_tiny_cpu.yaml"
OWN = ["trainer.engine=custom_engine:PlainTrainer", "rollout.engine=custom_engine:PlainRollout"]
SMALL = ["trainer.steps=3", "workflow.groups_per_step=8", "evaluation.prompts=16", "workflow.max_lag=0"]
BOX = Machine(2, 0, 24 << 30, 24 << 30, 12 << 30, 50 << 30)


def run(folder, *settings):
    """Metrics of each step."""
    command = [sys.executable, "-m", "mindspeed_asyncflow", "train", str(CONFIG), "--run-folder", str(folder)]
    for setting in [*SMALL, *settings]:
        command += ["--set", setting]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "examples")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_first_step_is_that_of_the_engines_of_the_project(tmp_path):
    """Two data-parallel ranks of plain PyTorch and `generate` of transformers; megatron-core and the plain-torch loop
    whose noise is a function of seed and place, as the example's."""
    built = run(tmp_path / "built", "rollout.engine=reference")
    own = run(tmp_path / "own", *OWN, "trainer.data_parallel=2")
    assert len(own) == len(built) == 3
    first, theirs = own[0], built[0]
    for name in ("reward/mean", "actor/tokens_count", "actor/lr", "samples_count", "response_length/mean"):
        assert first[name] == theirs[name], name
    assert first["actor/loss"] == pytest.approx(theirs["actor/loss"], abs=1e-6)
    assert first["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-5)
    assert first["actor/entropy"] == pytest.approx(theirs["actor/entropy"], rel=1e-5)
    ours, wanted = trained(tmp_path / "own", 2), trained(tmp_path / "built", 1)
    assert ours.keys() == wanted.keys() and len(ours) == 64
    for key, (ids, logprobs, advantage) in ours.items():
        assert ids == wanted[key][0], key
        assert logprobs == pytest.approx(wanted[key][1], abs=1e-5)
        assert advantage == wanted[key][2]
    for mine, other in zip(
        own, built
    ):  # weights of each version come to the replica: what it answers is what is trained
        assert mine["rollout_corr/abs_diff_max"] < 1e-4
        assert mine["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=0.05)
    assert (tmp_path / "own" / "hf" / "model.safetensors").is_file()
    audit = [sys.executable, "-m", "mindspeed_asyncflow", "audit", str(tmp_path / "own")]
    assert subprocess.run(audit, cwd=ROOT, capture_output=True, timeout=60).returncode == 0


def trained(folder, replicas):
    """(group, member) -> (answer, its log-probabilities, advantage) of the first step."""
    step = read_step(folder / "events", 0, replicas)
    columns = step.columns
    return {
        (int(group), int(member)): (
            np.asarray(columns["response_ids"][i]).tolist(),
            np.asarray(columns["rollout_logprobs"][i]).tolist(),
            float(columns["advantage"][i]),
        )
        for i, (group, member) in enumerate(zip(step.groups, step.members))
    }


@pytest.fixture
def errors(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")

    def found(*settings):
        config = load_config(CONFIG, [*OWN, *settings])
        return [str(finding) for finding in inspect(config, BOX) if finding.level == "error"]

    return found


def test_the_check_of_the_example_finds_nothing(errors):
    assert errors() == errors("trainer.data_parallel=2") == []


def test_the_example_refuses_what_it_cannot_do(errors):
    assert any("trainer.tensor_parallel: is 2, and PlainTrainer" in e for e in errors("trainer.tensor_parallel=2"))
    assert any("cannot sleep" in e for e in errors("workflow.schedule=colocated", "workflow.max_lag=0"))
