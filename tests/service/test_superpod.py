"""Launches that end before Ray starts. A script stands for ssh: it ignores which host it is to reach."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mindspeed_asyncflow.service.host_agent import ANSWER

ROOT = Path(__file__).parents[2]
AGENT = [sys.executable, "-m", "mindspeed_asyncflow.service.host_agent"]
pytestmark = pytest.mark.slow


def launch(tmp_path, hosts, *options, launcher=""):
    here = tmp_path / "here"
    here.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    here.chmod(0o755)
    file = tmp_path / "hosts.txt"
    file.write_text(hosts)
    command = [sys.executable, "-m", "mindspeed_asyncflow.service.superpod", "--hosts", str(file)]
    command += ["--config", "configs/debug/reference_engine.yaml", "--set", f"run.folder={tmp_path}/runs"]
    command += ["--launcher", launcher or str(here), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_malformed_host_file_is_refused_before_anything_is_reached(tmp_path):
    done = launch(tmp_path, "a slots=none\n", launcher="false")
    assert done.returncode == 2 and "line 1: slots=none" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_host_that_cannot_be_reached_is_named_with_what_the_launcher_said(tmp_path):
    script = tmp_path / "no-route"
    script.write_text('#!/bin/sh\necho "ssh: connect to host $1 port 22: No route to host" >&2\nexit 255\n')
    script.chmod(0o755)
    done = launch(tmp_path, "gone\n", launcher=str(script))
    assert done.returncode == 2
    assert "gone cannot be reached: its launcher ended (status 255)" in done.stderr
    assert "No route to host" in done.stderr
    assert "No route to host" in (tmp_path / "runs" / "latest" / "logs" / "gone.log").read_text()


def test_a_host_that_says_nothing_is_given_up_at_its_deadline(tmp_path):
    done = launch(tmp_path, "mute\n", "--connect-timeout", "0.5", launcher="sh -c 'exec sleep 60' {host}")
    assert done.returncode == 2
    assert "no answer (ready) within 0.5 s (--connect-timeout) from mute" in done.stderr


def test_a_launcher_command_that_is_not_there_is_named(tmp_path):
    done = launch(tmp_path, "a\n", launcher="no-such-command {host}")
    assert done.returncode == 2 and "'no-such-command' cannot be run" in done.stderr


def test_a_check_that_refuses_ends_the_launch_with_its_findings(tmp_path):
    done = launch(tmp_path, "here slots=1 address=127.0.0.1\n", "--set", "workflow.groups_per_step=7", "--set",
                  "trainer.data_parallel=2")  # fmt: skip
    assert done.returncode == 2
    assert "here: the check refuses (status 2)" in done.stderr and "groups_per_step" in done.stderr


def test_a_host_without_devices_must_be_told_how_many_it_has(tmp_path):
    if list(Path("/dev").glob("davinci[0-9]*")):
        pytest.skip("this machine has NPUs")
    done = launch(tmp_path, "here address=127.0.0.1\n")
    assert done.returncode == 2 and "here has no NPU: put slots=N behind its name" in done.stderr


class Agent:
    def __init__(self, tmp_path, silence_s):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(AGENT, cwd=ROOT, **pipes)
        shared = tmp_path / "shared"
        shared.write_text("token")
        told = {"environment": {}, "silence_s": silence_s, "address": "127.0.0.1", "peers": []}
        self.send(hello=told | {"shared": str(shared), "token": "token"})

    def send(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self, verb):
        for line in self.process.stdout:
            if line.startswith(ANSWER) and verb in (found := json.loads(line.removeprefix(ANSWER))):
                return found[verb]
        raise AssertionError(f"no {verb}")


@pytest.fixture
def agent(tmp_path):
    made = []

    def make(silence_s=60.0):
        made.append(Agent(tmp_path, silence_s))
        return made[0]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait()


def test_an_agent_whose_launcher_is_gone_ends_what_it_has_started(agent):
    host = agent()
    assert host.answer("ready")["equal"]["Python"].startswith(f"3.{sys.version_info.minor}.")
    host.send(run={"arguments": ["configs/debug/reference_engine.yaml"], "environment": {"RAY_ADDRESS": "127.0.0.1:1"}})
    driver = psutil.Process(host.answer("driver"))
    host.process.stdin.close()
    host.process.wait(40)
    assert host.process.returncode == 1 and not driver.is_running()


def test_an_agent_that_hears_nothing_of_its_launcher_ends_by_itself(agent):
    host = agent(silence_s=1.0)
    host.answer("ready")
    began = time.monotonic()
    assert host.process.wait(30) == 1 and time.monotonic() - began >= 0.5


def test_an_agent_stops_when_it_is_told_and_says_so(agent):
    host = agent()
    host.answer("ready")
    host.send(stop=0)
    assert host.answer("stopped") == 0 and host.process.wait(30) == 0
