"""Replicas that die, come late or do not come while a run goes on. Real processes."""

import json
import os
import signal
import time

import psutil
import pytest
from ray.cluster_utils import Cluster

from mindspeed_asyncflow.service.process_table import read_table
from tests.service.test_launch import DEFAULT, ROOT, SMALL, Job, balanced, finished, pid_of, spans

pytestmark = pytest.mark.slow
STORE = 128 << 20
REFERENCE = [*SMALL, "rollout.engine=reference", "rollout.max_new_tokens=48", "rollout.temperature=10"]


def test_a_replica_that_is_killed_in_the_middle_costs_speed_and_no_sample(tmp_path):
    """What it was answering is answered by the other one, which also fetches weights for the node from then on."""
    settings = [*REFERENCE, "rollout.replicas=2", "workflow.relay=mirror", "trainer.steps=12"]
    job = Job(tmp_path / "runs", DEFAULT, *settings)
    job.wait_for("step 1/")
    job.watch()
    os.kill(pid_of(job, "rollout"), signal.SIGKILL)
    summary = finished(job)
    assert summary["steps"] == 12 and balanced(summary) and summary["max_lag"] <= 1
    assert (summary["samples_trained"], summary["samples_dropped"]) == (12 * 64, 0)
    log = (job.folder / "log.txt").read_text()
    assert "rollout0 is lost, the others go on" in log and "rollout1 fetches weights for node" in log
    fetched = {who for *_, who in spans(job, "rollout/fetch_weights")}  # the dead one's last second is not in the trace
    assert "rollout1" in fetched
    assert job.leftovers() == []


@pytest.mark.nightly
def test_the_only_replica_may_stand_still_for_a_moment_and_is_replaced_when_it_stays_frozen(tmp_path):
    """The run waits for the new process, which answers what the frozen one held."""
    job = Job(tmp_path / "runs", DEFAULT, *REFERENCE, "trainer.steps=10", "faults.heartbeat_s=5")
    job.wait_for("step 1/")
    job.watch()
    table = job.folder / "processes.json"
    first = read_table(table)["rollout0"][0]
    os.kill(first, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(first, signal.SIGCONT)
    job.wait_for("step 3/")
    assert read_table(table)["rollout0"][0] == first, job.text
    os.kill(first, signal.SIGSTOP)
    job.wait_for("rollout0 is back")
    job.watch()
    assert read_table(table)["rollout0"][0] != first and not alive(first)
    summary = finished(job)
    assert summary["steps"] == 10 and balanced(summary) and summary["max_lag"] <= 1
    assert (summary["samples_trained"], summary["samples_dropped"]) == (10 * 64, 0)
    log = (job.folder / "log.txt").read_text()
    assert log.count("froze and was killed") >= 1 and "rollout0 joins at version" in log
    assert job.leftovers() == [] and not table.exists()


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


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
    """One that never comes does not hold anything up, neither the start nor the end."""
    settings = [*REFERENCE, "rollout.replicas=3", "rollout.min_replicas=1", "trainer.steps=100000"]
    job = Job(tmp_path / "runs", DEFAULT, *settings, "data.epochs=100000")
    job.wait_for("step 1/")
    nodes.add_node(num_cpus=1, resources={"NPU": 1.0}, object_store_memory=STORE)
    job.wait_for("joins at version")
    late = int(job.text.split(" joins at version")[0][-1])
    deadline = time.monotonic() + 60
    while late not in answering(job) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert answering(job) == {0, late}
    job.process.send_signal(signal.SIGINT)
    assert job.wait(15) == 130, job.text
    assert balanced(job.summary) and job.summary["max_lag"] <= 1 and job.summary["samples_dropped"] == 0
    assert job.leftovers() == []


def answering(job):
    events = [json.loads(line) for line in (job.folder / "events" / "events.jsonl").read_text().splitlines()]
    return {e["replica"] for e in events if e["kind"] == "generated"}
