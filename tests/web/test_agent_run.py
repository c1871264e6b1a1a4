"""A real run that trains nothing but an agent's trajectories, which it asks for as OpenAI's completions."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from mindspeed_asyncflow.cli import main
from mindspeed_asyncflow.service.process_table import read_table

ROOT = Path(__file__).parents[2]
STEPS, GROUPS, SIZE, LIMIT_S = 5, 16, 8, 150
SETTINGS = {
    "service.prompts": "client",
    "data.chat": "true",
    "data.chat_template": "examples/plain_chat.jinja",
    "rollout.engine": "reference",
    "rollout.replicas": "2",
    "workflow.groups_per_step": str(GROUPS),
    "evaluation.prompts": "0",
    "service.linger_s": "5",
}

pytestmark = pytest.mark.slow


class Process:
    def __init__(self, output, *words):
        self.output = output
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=ROOT, stdout=output.open("w"), stderr=subprocess.STDOUT
        )

    @property
    def text(self):
        return self.output.read_text()

    def wait_for(self, pattern):
        end = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self.text)) is None:
            assert self.process.poll() is None and time.monotonic() < end, self.text
            time.sleep(0.1)
        return found

    def ended(self):
        assert self.process.wait(LIMIT_S) == 0, self.text


@pytest.fixture
def server(tmp_path):
    """And its address. Whatever comes, it is ended."""
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    command = ["-m", "mindspeed_asyncflow", "serve", "configs/qwen_tiny_cpu.yaml", "--port", 0, *settings]
    started = Process(tmp_path / "serve.out", *command, "--set", f"run.folder={tmp_path / 'runs'}")
    try:
        yield started, started.wait_for(r"listening on (\S+)")[1]
    finally:
        if started.process.poll() is None:
            started.process.terminate()
            started.process.wait(LIMIT_S)


def test_an_agent_is_trained_by_its_trajectories_and_does_not_notice_that_a_replica_dies(server, tmp_path):
    serve, address = server
    token = tmp_path / "runs" / "service.token"
    agent = Process(
        tmp_path / "agent.out", "examples/agent.py", "--url", address, "--token-file", token, "--steps", STEPS
    )
    agent.wait_for("step 1:")
    folder = (tmp_path / "runs" / "latest").resolve()
    os.kill(read_table(folder / "processes.json")["rollout0"][0], signal.SIGKILL)
    other = openai.OpenAI(base_url=f"{address}/v1", api_key=token.read_text().strip(), max_retries=0)
    stream = other.completions.create(model="policy", prompt="7302>", stream=True, temperature=0, max_tokens=5)
    said = [chunk.choices[0] for chunk in stream]
    assert said[-1].finish_reason in ("stop", "length") and 0 <= said[0].version <= STEPS
    agent.ended()
    serve.ended()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["samples_trained"] == STEPS * GROUPS * SIZE
    assert summary["max_lag"] <= 1 and agent.text.count(": reward ") == STEPS
    assert "rollout0 is lost" in (folder / "log.txt").read_text()
    audit = [sys.executable, "-m", "mindspeed_asyncflow", "audit", str(folder)]
    audited = subprocess.run(audit, cwd=ROOT, capture_output=True, text=True)
    assert audited.returncode == 0, audited.stdout + audited.stderr


@pytest.mark.nightly
def test_a_program_that_scores_goes_on_when_the_trainer_is_killed_and_every_prompt_is_accounted_for(tmp_path):
    settings = [f"run.folder={tmp_path / 'runs'}", "trainer.save_every=5", "evaluation.prompts=0", "service.linger_s=5"]
    words = [word for setting in settings for word in ("--set", setting)]
    script = Process(tmp_path / "script.out", "examples/custom_algorithm.py", "--steps", 40, *words)
    script.wait_for("checkpoint of step 5:")
    folder = (tmp_path / "runs" / "latest").resolve()
    os.kill(read_table(folder / "processes.json")["trainer0"][0], signal.SIGKILL)
    script.ended()
    assert "go on from checkpoint" in script.text and "reward 0." in script.text
    assert json.loads((folder / "summary.json").read_text())["steps"] == 40
    assert main(["audit", str(folder)]) == 0
