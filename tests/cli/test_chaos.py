"""`asyncflow chaos` over a whole run with a fixed seed: nothing is lost, whoever is killed or frozen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_asyncflow.cli import main

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "debug" / "reference_engine.yaml"
SETTINGS = (
    "rollout.replicas=2",
    "evaluation.prompts=0",
    "faults.heartbeat_s=5",
    "trainer.steps=200",
    "trainer.save_every=10",
)
NOTHING = ("lost", "trained_twice", "law_violations", "leftover_processes", "leftover_files", "not_finished")


def asyncflow(*words):
    command = [sys.executable, "-m", "mindspeed_asyncflow", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_a_run_under_kills_and_freezes_loses_nothing_and_its_audit_agrees(tmp_path):
    struck = ("rollout", "scorer", "driver")
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    run = tmp_path / "run"
    done = asyncflow(
        "chaos", CONFIG, "--kills", 3, "--seed", 9, "--only", ",".join(struck), "--run-folder", run, *settings
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: found[name] for name in NOTHING} == dict.fromkeys(NOTHING, 0)
    assert found["kills"] == 3 and found["steps"] >= 200
    assert {name: c["kills"] + c["freezes"] for name, c in found["components"].items()} == dict.fromkeys(struck, 1)
    audited = asyncflow("audit", run, "--json")
    assert audited.returncode == 0 and json.loads(audited.stdout)["resumes"] == found["resumes"]


def test_settings_and_folders_that_cannot_be_used_are_refused_before_anything_starts(tmp_path, capsys):
    (tmp_path / "kept").touch()
    for words, said in (
        (("--kills", "0"), "--kills 0"),
        (("--run-folder", str(tmp_path)), "is not empty"),
        (("--set", "faults.heartbeats=3"), "faults.heartbeat_s"),
    ):
        assert main(["chaos", str(CONFIG), *words]) == 2
        assert said in capsys.readouterr().err
