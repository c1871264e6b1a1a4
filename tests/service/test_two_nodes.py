"""A whole run on a Ray of two nodes, which share this machine: placement decides who loads through a mirror."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.service.test_launch import DEFAULT, ROOT, SMALL

pytestmark = pytest.mark.slow
STORE = 128 << 20


@pytest.fixture
def address(monkeypatch):
    """A head with one device and a second node with two: a trainer and two replicas need both."""
    for name, value in {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}.items():
        monkeypatch.setenv(name, value)  # Ray's processes have it from here
    head = {"num_cpus": 1, "resources": {"NPU": 1.0}, "object_store_memory": STORE, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes.add_node(num_cpus=1, resources={"NPU": 2.0}, object_store_memory=STORE)
        yield nodes.address
    finally:
        nodes.shutdown()


def test_replicas_on_another_node_than_the_trainer_load_through_its_mirror(tmp_path, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    settings = [*SMALL, "rollout.engine=reference", "rollout.replicas=2", f"run.folder={tmp_path}"]
    command = [sys.executable, "-m", "mindspeed_asyncflow", "train", str(DEFAULT)]
    command += [word for setting in settings for word in ("--set", setting)]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, _ = job.communicate(timeout=200)
    assert job.returncode == 0, said
    folder = tmp_path / "latest"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples_trained"] == 4 * 64 and summary["max_lag"] <= 1
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4
    spans = [e for e in json.loads((folder / "trace" / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    fetched = [e["args"]["version"] for e in spans if e["name"] == "rollout/fetch_weights"]
    assert fetched[0] == 0 and fetched[-1] == 4 and fetched == sorted(set(fetched))
    assert not list(Path("/dev/shm").glob(f"asyncflow-{job.pid}-*"))
