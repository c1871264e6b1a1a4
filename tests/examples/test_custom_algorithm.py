"""The example of an algorithm of one's own: a whole run through HTTP that learns."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindspeed_asyncflow.cli.audit import audit_run
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.service.experience import NOTHING
from mindspeed_asyncflow.service.verbs import Experience

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_algorithm.py"


def test_it_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 80


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("custom_algorithm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["custom_algorithm.py", "--url", "http://nowhere", "--steps", "1"])
    return module


class Answers:
    """In the place of `Client`: a run of one step and two groups, slow at first, whose trainer is started again."""

    def __init__(self, error=""):
        one = Experience(
            5, np.arange(2), np.array([3, 3]), np.arange(2), {"response": ["12", "21"], "truth": ["12"] * 2}
        )
        nothing = replace(NOTHING, columns={"response": [], "truth": []})
        self.answers, self.written, self.prompts, self.error = [nothing, one, nothing, one], [], [], error

    def __enter__(self):
        return self

    def __exit__(self, *error): ...

    def init_engines(self, overrides):
        return {"steps": overrides["trainer.steps"], "groups_per_step": 2, "accepted": 0}

    def put_prompts_data(self, prompts, last):
        self.prompts += prompts
        assert last

    def get_experience_data(self, task, columns, groups):
        if not self.answers:
            raise ServiceError(409, "ended", "the run has ended")
        return self.answers.pop(0)

    def put_experience_data(self, claim, rows, columns):
        self.written.append((claim, columns["rewards"].tolist(), columns["advantages"]))
        if len(self.written) == 1:
            raise ServiceError(404, "unknown_claim", "claim 5 is not held")

    def stop(self):
        return {"error": self.error, "summary": {"reward_first": 0, "reward_last": 1, "heldout_greedy": 0.5}}


def test_it_goes_on_when_nothing_is_there_yet_and_when_a_claim_is_lost_and_ends_with_the_run(
    example, monkeypatch, capsys
):
    client = Answers()
    monkeypatch.setattr(example, "Client", lambda url, token_file: client)
    example.main()
    assert client.written == [(5, [2.0, 0.0], [1.0, -1.0])] * 2 and len(client.prompts) == 2
    assert "held-out 0.5" in capsys.readouterr().out
    client = Answers("a trainer died too often")
    with pytest.raises(SystemExit, match="died too often"):
        example.main()


def test_a_server_that_does_not_start_is_told_and_one_whose_program_fails_is_ended(example, monkeypatch):
    started, real = [], subprocess.Popen

    def instead(code):
        def popen(command, **how):
            started.append(real([sys.executable, "-c", code], **how))
            return started[-1]

        monkeypatch.setattr(example.subprocess, "Popen", popen)

    instead("raise SystemExit(2)")
    with pytest.raises(SystemExit, match="has not started: it ended with 2"), example.own_server([]):
        pass
    instead("import time; print('token: x'); print('listening on http://x', flush=True); time.sleep(60)")
    with pytest.raises(KeyError, match="mine"), example.own_server([]) as (url, token):
        assert url == "http://x" and token.name == "token"
        raise KeyError("mine")
    assert started[-1].wait(10) < 0


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
