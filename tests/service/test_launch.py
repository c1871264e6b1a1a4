"""Whole runs as a user starts them: real Ray, real processes, real engines."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "configs" / "qwen_tiny_cpu.yaml"
SMALL = ["trainer.steps=4", "workflow.groups_per_step=8", "evaluation.prompts=16"]
ENDLESS = [*SMALL, "trainer.steps=100000", "data.epochs=100000", "rollout.engine=reference"]

pytestmark = pytest.mark.slow


class Job:
    """`asyncflow train` in a process of its own, which ends with its test at the latest."""

    started: ClassVar[list[subprocess.Popen]] = []

    def __init__(self, base, config, *settings):
        self.base = Path(base)
        command = [sys.executable, "-m", "mindspeed_asyncflow", "train", str(config), "--set", f"run.folder={base}"]
        for setting in settings:
            command += ["--set", setting]
        self.output = self.base.with_suffix(".out")
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self.output.open("w"), stderr=subprocess.STDOUT)
        self.started.append(self.process)
        self.seen: dict[int, psutil.Process] = {}

    @classmethod
    def end_all(cls):
        for process in cls.started:
            process.kill()  # its reaper ends what it has started
            process.wait(30)
        cls.started.clear()

    @property
    def text(self):
        return self.output.read_text()

    def wait_for(self, phrase, timeout_s=150):
        deadline = time.monotonic() + timeout_s
        while phrase not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, f"{phrase!r} did not appear:\n{self.text}"
            self.watch()
            time.sleep(0.2)

    def watch(self):
        self.seen |= {p.pid: p for p in psutil.Process(self.process.pid).children(recursive=True)}

    def wait(self, timeout_s=240):
        return self.process.wait(timeout_s)

    def leftover_processes(self):
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=0.1)
        return [p.name() for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def leftovers(self):
        return self.leftover_processes() + list(Path("/dev/shm").glob(f"asyncflow-{self.process.pid}-*"))

    @property
    def folder(self):
        return self.base / "latest"

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())


def finished(job):
    assert job.wait() == 0, job.text
    return job.summary


def balanced(summary):
    return summary["samples_issued"] == (
        summary["samples_trained"] + summary["samples_dropped"] + summary["samples_open"]
    )


def test_the_default_job_learns_within_its_time_and_accounts_for_every_sample(tmp_path):
    job = Job(tmp_path / "runs", DEFAULT)
    summary = finished(job)
    assert summary["steps"] == 60
    assert summary["reward_first"] < 0.4 and summary["reward_last"] >= 0.80
    assert summary["heldout_greedy"] >= 0.95
    assert summary["max_lag"] == 1
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4
    assert balanced(summary) and summary["samples_trained"] == 60 * 256
    for name in ("config.yaml", "metrics.jsonl", "report.html", "trace/trace.json", "hf/model.safetensors"):
        assert (job.folder / name).stat().st_size > 0, name
    assert len((job.folder / "metrics.jsonl").read_text().splitlines()) == 60
    processes = {e["args"]["name"] for e in trace(job) if e["name"] == "process_name"}
    assert {"rollout0", "trainer0", "scorer"} <= processes


def trace(job):
    return json.loads((job.folder / "trace" / "trace.json").read_text())["traceEvents"]


def test_lag_0_trains_the_same_weights_twice_on_a_seed_also_on_a_dock_of_two_pairs(tmp_path):
    weights = []
    for name, pairs in (("first", 1), ("second", 2)):
        job = Job(tmp_path / name, DEFAULT, "workflow.max_lag=0", "trainer.steps=3", f"dock.pairs={pairs}")
        assert finished(job)["max_lag"] == 0
        weights.append(load_file(job.folder / "hf" / "model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][k] == weights[1][k]).all() for k in weights[0])


def test_tensor_and_pipeline_parallel_trainer_feeds_two_replicas(tmp_path):
    summary = finished(Job(tmp_path / "runs", ROOT / "configs" / "debug" / "tp2_pp2_two_replicas.yaml"))
    assert summary["steps"] == 5 and balanced(summary)
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4


def spans(job, name):
    """[begin, end) in microseconds of all spans of this name, with the process that they belong to."""
    processes = {e["pid"]: e["args"]["name"] for e in trace(job) if e["name"] == "process_name"}
    found = [e for e in trace(job) if e["ph"] == "X" and e["name"] == name]
    return sorted((e["ts"], e["ts"] + e["dur"], processes[e["pid"]]) for e in found)


def metrics(job):
    return [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]


def test_rolling_updates_load_one_replica_at_a_time(tmp_path):
    settings = [*SMALL, "rollout.engine=reference", "rollout.replicas=2", "workflow.update=rolling"]
    job = Job(tmp_path / "runs", DEFAULT, *settings)
    summary = finished(job)
    assert summary["samples_trained"] == 4 * 64 and summary["max_lag"] <= 1
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4
    loads = spans(job, "rollout/load_weights")
    assert {process for *_, process in loads} == {"rollout0", "rollout1"}
    assert all(end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(loads))


def test_in_flight_updates_change_weights_inside_answers_and_keep_the_lag_law(tmp_path):
    """At this temperature answers are long enough for a version to come in the middle of them."""
    settings = [*SMALL, "rollout.engine=reference", "rollout.max_new_tokens=64", "rollout.temperature=10"]
    job = Job(tmp_path / "runs", DEFAULT, *settings, "workflow.update=in_flight", "trainer.steps=8")
    summary = finished(job)
    assert summary["samples_trained"] == 8 * 64 and summary["max_lag"] == 1
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4
    rows = metrics(job)
    assert max(row["staleness/version_span_max"] for row in rows) == 2
    assert max(row["staleness/worst_max"] for row in rows) == 1
    assert len(spans(job, "train/publish")) == 9


def test_reference_engine_with_kl_agrees_with_the_trainer_at_any_temperature(tmp_path):
    """B22: policy, rollout and reference are equal at step 0 and sampled at 0.7, so KL and drift are rounding only."""
    settings = [*SMALL, "rollout.engine=reference", "rollout.temperature=0.7", "algorithm.kl_coef=0.01"]
    settings += ["algorithm.proximal=current", "correction.weight=token", "correction.cap=2.0"]
    job = Job(tmp_path / "runs", DEFAULT, *settings)
    summary = finished(job)
    assert summary["samples_trained"] == 4 * 64
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4
    first, *_, last = metrics(job)
    assert first["rollout_corr/abs_diff_max"] < 1e-4 and abs(first["actor/kl_loss"]) < 1e-6
    assert last["actor/kl_loss"] > 1e-6


@pytest.mark.nightly
def test_the_packaged_smollm2_answers_in_words_and_is_trained(tmp_path):
    job = Job(tmp_path / "runs", ROOT / "configs" / "smollm2_135m_cpu.yaml", "trainer.steps=2")
    assert job.wait(900) == 0, job.text
    assert job.summary["samples_trained"] == 128 and job.summary["heldout_greedy"] > 0.1
    assert "Calculate" in (job.folder / "samples" / "step_000000.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process_within_15_s(tmp_path, number):
    """B97: nothing of the run is left, and the same job starts again."""
    for _ in range(2 if number == signal.SIGINT else 1):
        job = Job(tmp_path / "runs", DEFAULT, *ENDLESS)
        job.wait_for("step 1/")
        job.watch()
        job.process.send_signal(number)
        assert job.wait(15) == 130, job.text
        assert job.leftovers() == []
        assert "stopped by a signal" in job.summary["error"]


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("trainer", "dock")]


@pytest.mark.parametrize("victim", ["rollout", *NIGHTLY, "driver"])
def test_a_killed_process_ends_the_run_with_its_name_and_leaves_nothing(tmp_path, victim):
    """B47, B97: kill -9 after step 1, where nothing is replaced."""
    job = Job(tmp_path / "runs", DEFAULT, *ENDLESS, "faults.max_restarts=0")
    job.wait_for("step 1/")
    job.watch()
    began = time.monotonic()
    if victim == "driver":
        job.process.kill()
        job.wait(15)
        while job.leftover_processes() and time.monotonic() - began < 15:
            time.sleep(0.2)
        assert job.leftover_processes() == []
        return
    os.kill(pid_of(job, victim), signal.SIGKILL)
    assert job.wait(15) == 1, job.text
    assert f"{victim}0" in job.summary["error"]
    assert not (job.folder / "checkpoints").exists()
    assert job.leftovers() == []


def pid_of(job, worker):
    found = re.search(rf"{worker}0 is process (\d+)", (job.folder / "log.txt").read_text())
    assert found, f"no process id of {worker}0 in the log"
    return int(found[1])


def loaded_through_mirror(job):
    """Fetches of the run, all by the first replica of the node, beside what both replicas generate and load."""
    fetches = spans(job, "rollout/fetch_weights")
    assert {process for *_, process in fetches} == {"rollout0"}
    assert {process for *_, process in spans(job, "rollout/load_weights")} == {"rollout0", "rollout1"}
    assert max(row["weight_sync/fetch_s"] for row in metrics(job)) > 0
    return fetches


def test_replicas_of_one_node_load_through_its_mirror_and_leave_nothing(tmp_path):
    """The path of several nodes on one: relay server, mirror, differences only; rows, law and probe as ever."""
    settings = [*SMALL, "rollout.engine=reference", "rollout.replicas=2", "workflow.relay=mirror"]
    job = Job(tmp_path / "runs", DEFAULT, *settings, "workflow.relay_delta=true", "trainer.steps=6")
    summary = finished(job)
    assert summary["samples_trained"] == 6 * 64 and summary["max_lag"] <= 1 and balanced(summary)
    assert summary["rollout_train_logprob_gap_max"] <= 2e-4
    assert 1 <= len(loaded_through_mirror(job)) <= 7  # once per version, or less where the next one was there already
    assert max(row["weight_sync/saved_share"] for row in metrics(job)) > 0
    assert job.leftovers() == []


@pytest.mark.nightly
def test_lag_0_trains_the_same_weights_with_and_without_a_mirror(tmp_path):
    weights = []
    for relay in ("auto", "mirror"):
        settings = ["rollout.engine=reference", "rollout.replicas=2", "workflow.max_lag=0", f"workflow.relay={relay}"]
        job = Job(tmp_path / relay, DEFAULT, *SMALL, *settings, "trainer.steps=3")
        assert finished(job)["max_lag"] == 0
        weights.append(load_file(job.folder / "hf" / "model.safetensors"))
    loaded_through_mirror(job)
    assert all((weights[0][k] == weights[1][k]).all() for k in weights[0])
