"""Replicas that die, come late or do not come while a run goes on. Real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.service.test_launch import DEFAULT, ROOT, SMALL, Job, balanced, finished, pid_of, spans

pytestmark = pytest.mark.slow
STORE = 128 << 20
REFERENCE = [*SMALL, "rollout.engine=reference", "rollout.max_new_tokens=48", "rollout.temperature=10"]


def test_a_replica_that_is_killed_in_the_middle_costs_speed_and_no_sample(tmp_path):
    """What it was answering is answered by the other one; mirrors: the one that fetched is killed, the other takes over."""
    settings = [*REFERENCE, "rollout.replicas=2", "workflow.relay=mirror", "trainer.steps=12"]
    job = Job(tmp_path / "runs", DEFAULT, *settings)
    job.wait_for("step 3/")
    job.watch()
    os.kill(pid_of(job, "rollout"), signal.SIGKILL)
    summary = finished(job)
    assert summary["steps"] == 12 and balanced(summary) and summary["max_lag"] <= 1
    assert (summary["samples_trained"], summary["samples_dropped"]) == (12 * 64, 0)
    log = (job.folder / "log.txt").read_text()
    assert "rollout0 is lost, the others go on" in log and "rollout1 fetches weights for node" in log
    assert {who for *_, who in spans(job, "rollout/fetch_weights")} == {"rollout0", "rollout1"}
    assert job.leftovers() == []


@pytest.fixture
def nodes(monkeypatch):
    """A Ray head with devices for a trainer and one replica."""
    for name, value in {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}.items():
        monkeypatch.setenv(name, value)  # Ray's processes have it from here
    head = {"num_cpus": 1, "resources": {"NPU": 2.0}, "object_store_memory": STORE, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        yield made
    finally:
        made.shutdown()


def test_a_run_starts_with_the_replicas_that_are_there_and_a_node_that_comes_later_brings_one_more(tmp_path, nodes):
    settings = [*REFERENCE, "rollout.replicas=3", "rollout.min_replicas=1", f"run.folder={tmp_path}"]
    settings += ["trainer.steps=40", "workflow.start_timeout_s=120", "data.epochs=100"]
    command = [sys.executable, "-m", "mindspeed_asyncflow", "train", str(DEFAULT)]
    command += [word for setting in settings for word in ("--set", setting)]
    said = tmp_path / "said"
    job = subprocess.Popen(command, cwd=ROOT, stdout=said.open("w"), stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 120
    while "step 1/" not in said.read_text() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    nodes.add_node(num_cpus=1, resources={"NPU": 1.0}, object_store_memory=STORE)
    assert job.wait(200) == 0, said.read_text()
    folder = tmp_path / "latest"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples_trained"] == 40 * 64 and balanced(summary) and summary["max_lag"] <= 1
    log = (folder / "log.txt").read_text()
    assert "joins at version" in log, log
    events = [json.loads(line) for line in (folder / "events" / "events.jsonl").read_text().splitlines()]
    (late,) = [e["replica"] for e in events if e["kind"] == "joined"]
    assert {e["replica"] for e in events if e["kind"] == "generated"} == {0, late}
    assert not list(Path("/dev/shm").glob(f"asyncflow-{job.pid}-*"))
