"""Scorer, reference and dock pairs that are killed and frozen while a run goes on. Real processes."""

import json
import os
import re
import signal
import time

import pytest

from mindspeed_asyncflow.cli import main
from mindspeed_asyncflow.service.process_table import read_table
from tests.service.test_launch import DEFAULT, ENDLESS, Job, balanced

pytestmark = pytest.mark.slow
LIMIT_S = 90.0  # for a process to be noticed and to be there again, on a machine that does other things too


def wait_until(job, condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert job.process.poll() is None, job.text
        assert time.monotonic() < deadline, f"{what} did not happen:\n{job.text}"
        time.sleep(0.1)


def steps(job):
    return max(map(int, re.findall(r"step (\d+)/", job.text)), default=0)


def replaced(job, name, number):
    """Send the signal; another process has the name afterwards, and a further step is trained."""
    before, step = read_table(job.folder / "processes.json")[name][0], steps(job)
    os.kill(before, number)
    wait_until(job, lambda: read_table(job.folder / "processes.json")[name][0] != before, f"another {name}")
    wait_until(job, lambda: job.text.count(f"{name} is back") and steps(job) > step + 1, f"a step after the new {name}")


def test_scorer_reference_and_pairs_may_be_killed_and_frozen_and_every_sample_is_accounted_for(tmp_path):
    settings = [*ENDLESS, "dock.pairs=2", "algorithm.kl_coef=0.01", "faults.heartbeat_s=4", "faults.max_restarts=9"]
    job = Job(tmp_path / "runs", DEFAULT, *settings)
    job.wait_for("step 1/", 300)
    for name, number in (
        ("scorer", signal.SIGKILL), ("dock0", signal.SIGKILL), ("dock1", signal.SIGSTOP),
        ("reference0", signal.SIGKILL), ("scorer", signal.SIGSTOP),
    ):  # fmt: skip
        replaced(job, name, number)
    job.watch()
    job.process.send_signal(signal.SIGINT)
    assert job.wait(20) == 130, job.text
    assert balanced(job.summary) and job.summary["max_lag"] <= 1 and job.summary["samples_dropped"] == 0
    assert job.leftovers() == []
    events = [json.loads(line) for line in (job.folder / "events" / "events.jsonl").read_text().splitlines()]
    lost, back = ([e["component"] for e in events if e["kind"] == kind] for kind in ("lost", "recovered"))
    assert lost == back == ["scorer", "dock0", "dock1", "reference0", "scorer"]
    assert main(["audit", str(job.folder)]) == 0
