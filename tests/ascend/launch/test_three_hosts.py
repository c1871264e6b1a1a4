"""The launch scripts over three hosts: namespaces stand for machines, a command that enters them for ssh and srun."""

import json
import os
import signal
import subprocess
import time

import pytest

from tests.ascend.launch import hosts as namespaces
from tests.ascend.launch.hosts import ROOT, Hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not namespaces.possible(), reason="this machine permits no namespaces with a network"),
]
CONFIG = "configs/debug/reference_engine.yaml"
SETTINGS = ["rollout.replicas=2", "run.ray_cpus=1", "observe.tensorboard=false"]
ENDLESS = ["trainer.steps=100000", "data.epochs=100000", "evaluation.prompts=0"]


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(3, tmp_path)
    try:
        yield made
    finally:
        made.remove()


def words(hosts, *settings):
    given = [f"run.folder={hosts.folder}/runs", *SETTINGS, *settings]
    return ["--platform", "cpu", "--config", CONFIG, *(word for setting in given for word in ("--set", setting))]


def environment(hosts, **more):
    return os.environ | {"PATH": f"{hosts.tools}:{os.environ['PATH']}"} | more


def test_a_run_over_three_hosts_finishes_and_leaves_nothing_on_any(hosts):
    file = hosts.file(
        "node1 slots=1 address=10.78.0.2  # the first line leads",
        "node0 slots=1 address=10.78.0.1",
        "node2 slots=1 address=10.78.0.3 superpod=far",
    )
    command = [
        "bash",
        str(ROOT / "scripts/launch_qwen_grpo.sh"),
        "--hosts",
        str(file),
        "--launcher",
        str(hosts.launcher),
    ]
    done = subprocess.run(
        [*command, *words(hosts)], env=environment(hosts), capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = hosts.folder / "runs" / "latest"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["samples_trained"] == 5 * 64 and summary["max_lag"] <= 1
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4
    assert (folder / "logs" / "hosts").read_text().splitlines() == [
        "node1 slots=1 superpod=3 address=10.78.0.2",  # its number comes from npu-smi
        "node0 slots=1 superpod=3 address=10.78.0.1",
        "node2 slots=1 superpod=far address=10.78.0.3",
    ]
    log = (folder / "log.txt").read_text()
    for placed in (
        "10.78.0.2 has trainer0, dock0",
        "10.78.0.1 has rollout1, dock1",
        "10.78.0.3 has rollout0, dock2",
    ):
        assert placed in log
    assert "step 5/5" in done.stdout and "step 5/5" in (folder / "logs" / "node1.log").read_text()
    assert hosts.left() == {}


SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames node[0-2]" ] && printf "node0\\nnode1\\nnode2\\n"\n'
SRUN = """#!/bin/sh
for word; do case $word in --nodelist=*) node=${word#*=};; esac; last=$word; done
exec %s "$node" "$last"
"""


def in_slurm(hosts):
    """Stand-ins for Slurm's commands, and what it tells a batch job."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN % hosts.launcher)):
        (hosts.tools / name).write_text(text)
        (hosts.tools / name).chmod(0o755)
    given = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[0-2]",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "ASYNCFLOW_SLOTS": "1",
    }
    return environment(hosts, **given)


def test_a_host_that_dies_ends_a_slurm_job_on_all_others_with_its_name(hosts, tmp_path):
    said = tmp_path / "said"
    command = ["bash", str(ROOT / "scripts/launch_slurm.sh"), "--no-check", *words(hosts, *ENDLESS)]
    with said.open("w") as file:
        job = subprocess.Popen(command, env=in_slurm(hosts), stdout=file, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 400
        while "step 1/" not in said.read_text():
            assert job.poll() is None and time.monotonic() < until, said.read_text()
            time.sleep(0.2)
        hosts.hosts[2].kill()
        assert job.wait(120) == 1, said.read_text()
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.wait(60)
    assert "launch: error: node2 is lost: its connection ended" in said.read_text()
    assert hosts.left() == {}
