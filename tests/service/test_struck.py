"""Whole runs that are struck at known moments: several blows in one run, and then its audit. Real processes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mindspeed_asyncflow.cli import main
from mindspeed_asyncflow.observe.checkpoints import newest_complete
from mindspeed_asyncflow.service.process_table import read_table
from tests.service.test_launch import DEFAULT, ROOT, Job, balanced, metrics

pytestmark = pytest.mark.slow
PPO = ROOT / "configs" / "debug" / "ppo_critic.yaml"
SMALL = ["workflow.groups_per_step=8", "evaluation.prompts=0", "rollout.engine=reference", "faults.heartbeat_s=4"]
SMALL += ["faults.max_restarts=9", "data.epochs=100000"]
LIMIT_S = 150.0  # for one thing to happen, on a machine that others use


RUNS = []


@pytest.fixture(autouse=True)
def _no_run_stays():
    """A test that fails leaves no run behind that goes on."""
    yield
    while RUNS:
        process = RUNS.pop().process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:  # its reaper ends the rest
                process.kill()


class Run(Job):
    """`asyncflow train` in `folder`, which may hold a run; `how`: further arguments."""

    def __init__(self, folder, config, *settings, how=()):
        self.base, self.seen = Path(folder), {}
        words = [word for setting in [*SMALL, *settings] for word in ("--set", setting)]
        command = [sys.executable, "-m", "mindspeed_asyncflow", "train", str(config), "--run-folder", str(folder)]
        self.output = self.base.with_suffix(f".{time.monotonic_ns()}.out")
        self.process = subprocess.Popen(
            [*command, *how, *words], cwd=ROOT, stdout=self.output.open("w"), stderr=subprocess.STDOUT
        )
        RUNS.append(self)

    @property
    def folder(self):
        return self.base

    def until(self, holds, what, pause_s=0.1):
        deadline = time.monotonic() + LIMIT_S
        while not (found := holds()):
            assert self.process.poll() is None, f"the run ended before this: {what}\n{self.text}"
            assert time.monotonic() < deadline, f"not seen: {what}\n{self.text}"
            time.sleep(pause_s)
        return found

    def pid(self, name):
        return read_table(self.folder / "processes.json")[name][0]

    @property
    def last(self):
        """The metrics of the newest step that has ended; those of none before the first."""
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):  # or half a line
            return json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[-1])
        return {"step": -1, "time": 0.0}

    def trains(self):
        """Wait for a step that ends from now on."""
        moment = time.time()
        self.until(lambda: self.last["time"] > moment, "a step")

    @property
    def made(self):
        """Steps that the newest checkpoint has."""
        return int(self.newest().name.removeprefix("step_"))

    def newest(self):
        return newest_complete(self.folder / "checkpoints", check=False)

    def strike(self, name, number):
        """The process that has the name now; it is gone or stopped when this returns."""
        self.watch()
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def back(self, name, before):
        """Another process has the name, and training goes on."""
        self.until(lambda: self.pid(name) != before, f"another {name}")
        self.trains()
        self.watch()

    def checkpoint_begun(self, step=None, part=""):
        """Wait for a checkpoint (of `step`) that is being written, with the part that begins so; its folder."""
        wanted = f".step_{step:06d}-" if step is not None else ".step_"
        root = self.folder / "checkpoints"

        def begun():
            for partial in root.glob(f"{wanted}*.partial"):
                try:
                    if not part or any(name.startswith(part) for name in os.listdir(partial)):
                        return partial
                except FileNotFoundError:
                    continue

        return self.until(begun, f"a checkpoint that is being written {part}", pause_s=0.0005)

    def strike_in_checkpoint(self, name, step=None, part=""):
        """Kill while a checkpoint is being written; the process that had the name."""
        while True:
            pid = self.pid(name)
            partial = self.checkpoint_begun(step, part)
            os.kill(pid, signal.SIGKILL)
            if partial.exists():
                return pid
            assert step is None, f"the checkpoint of step {step} was complete too early to be struck"
            self.back(name, pid)

    def ended(self):
        """The exit status, of a run whose processes are all known then."""
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            with contextlib.suppress(psutil.NoSuchProcess):
                self.watch()
            time.sleep(0.1)
        return self.process.returncode

    def stop(self):
        self.watch()
        self.process.send_signal(signal.SIGINT)
        assert self.wait(30) == 130, self.text

    @property
    def replaced(self):
        """Components that were started again, in the order in which they were back."""
        return re.findall(r"^warning: (\w+) is back after", self.text, re.MULTILINE)


def audited(run):
    """The run's audit holds, its numbers add up, and nothing of it is left."""
    assert main(["audit", str(run.folder)]) == 0
    assert balanced(run.summary) and run.summary["max_lag"] <= 1
    assert run.leftovers() == []
    steps = [row["step"] for row in metrics(run)]
    assert steps == list(range(steps[0], steps[-1] + 1))  # those before are in the other run's folder


@pytest.mark.nightly
def test_critic_reference_and_pairs_are_struck_also_while_a_checkpoint_is_written(tmp_path):
    settings = ["trainer.steps=100000", "trainer.save_every=10", "dock.pairs=2", "algorithm.kl_coef=0.01"]
    run = Run(tmp_path / "run", PPO, *settings)
    run.trains()
    killed = run.strike_in_checkpoint("critic0")
    run.until(lambda: "go on from version 0" in run.text, "a restart without a checkpoint")
    run.back("critic0", killed)
    killed = run.strike_in_checkpoint("dock1", part=".dock")
    run.back("dock1", killed)
    run.until(run.newest, "a checkpoint")
    frozen = {name: run.strike(name, signal.SIGSTOP) for name in ("critic0", "reference0")}
    run.until(lambda: "go on from checkpoint" in run.text, "a restart from a checkpoint")
    for name, pid in frozen.items():
        run.back(name, pid)
    run.stop()
    assert run.replaced[:2] == ["critic0", "dock1"] and sorted(run.replaced[2:]) == ["critic0", "reference0"]
    audited(run)


@pytest.mark.nightly
def test_a_run_goes_on_after_rays_head_and_in_a_new_folder_and_is_struck_at_its_last_checkpoint(tmp_path):
    """Two drivers end with Ray's head, and leave nothing. The second run has no checkpoint of its own, only that of the
    first one, when its trainer dies and when the same command starts it again."""
    first = Run(tmp_path / "first", DEFAULT, "trainer.steps=100000", "trainer.save_every=10")
    first.until(first.newest, "a checkpoint")
    killed = first.strike_in_checkpoint("trainer0")
    first.until(lambda: "go on from checkpoint" in first.text, "a restart from a checkpoint")
    first.back("trainer0", killed)
    first.strike("gcs_server", signal.SIGKILL)
    assert first.wait(15) == 1 and "Ray's gcs_server" in first.summary["error"], first.text
    assert first.leftovers() == []
    begins = first.newest()
    how, steps = ["--resume", str(begins)], first.made + 60
    settings = [f"trainer.steps={steps}", f"trainer.save_every={10 * steps}"]
    second = Run(tmp_path / "second", DEFAULT, *settings, how=how)
    second.trains()
    killed = second.strike("trainer0", signal.SIGKILL)
    second.until(
        lambda: f"go on from checkpoint {begins.name}" in second.text, "a restart from another run's checkpoint"
    )
    second.back("trainer0", killed)
    second.strike("raylet", signal.SIGSTOP)
    assert second.wait(15) == 1 and "Ray's raylet" in second.summary["error"], second.text
    assert second.leftovers() == [] and second.newest() is None
    third = Run(tmp_path / "second", DEFAULT, *settings, how=how)
    third.trains()
    killed = third.strike_in_checkpoint("trainer0", step=steps)
    assert third.wait(LIMIT_S) == 0, third.text
    assert third.summary["steps"] == steps and third.replaced == ["trainer0"]
    audited(third)


def test_an_error_in_step_2_ends_the_run_with_its_words_and_leaves_nothing(tmp_path):
    """B97: after an absurd first step the weights are not finite, and whoever sees that first says so."""
    absurd = ["trainer.lr=1e30", "trainer.lr_warmup_steps=0", "trainer.max_bad_steps=1"]
    run = Run(tmp_path / "run", DEFAULT, *absurd)
    assert run.ended() == 1, run.text
    assert run.summary["error"] and 1 <= run.summary["steps"] <= 2, run.text
    assert run.leftovers() == [] and run.newest() is None


@pytest.mark.nightly
def test_who_fetches_weights_for_a_node_is_killed_its_heir_frozen_and_the_memory_of_the_dock_lost(tmp_path):
    run = Run(tmp_path / "run", DEFAULT, "trainer.steps=100000", "rollout.replicas=2", "workflow.relay=mirror")
    run.trains()
    for name, number in (("rollout0", signal.SIGKILL), ("rollout1", signal.SIGSTOP)):
        struck = run.strike(name, number)
        run.back(name, struck)
    arena = Path(f"/dev/shm/asyncflow-{run.process.pid}-arena0")
    struck = run.strike("dock0", signal.SIGKILL)
    arena.unlink()
    run.back("dock0", struck)
    run.stop()
    assert run.replaced[:3] == ["rollout0", "rollout1", "dock0"] and set(run.replaced[3:]) <= {"trainer"}
    assert "rollout1 fetches weights" in run.text and "rollout0 fetches weights" in run.text
    audited(run)


@pytest.mark.nightly
def test_a_killed_vllm_replica_is_replaced_and_its_answers_go_on(tmp_path):
    settings = ["rollout.engine=vllm", "rollout.replicas=2", "faults.heartbeat_s=30", "trainer.steps=100000"]
    run = Run(tmp_path / "run", DEFAULT, *settings)
    run.trains()
    killed = run.strike("rollout1", signal.SIGKILL)
    run.back("rollout1", killed)
    run.stop()
    assert run.replaced == ["rollout1"]
    audited(run)
