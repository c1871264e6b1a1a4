"""`asyncflow replay`: what it says of folders that it cannot repeat, and a whole run that it repeats."""

import json
import re
import signal
import subprocess
import sys
import time
from os import kill
from pathlib import Path

import numpy as np
import pytest

from mindspeed_asyncflow.cli import main
from mindspeed_asyncflow.config.load import dump_resolved
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.records import OptimReport, WeightManifest
from mindspeed_asyncflow.workflow.events import EventLog
from mindspeed_asyncflow.workflow.record import open_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_folder(tmp_path):
    """A run of one step of which the samples are missing."""
    settings = dump_resolved(Config())
    (tmp_path / "config.yaml").write_text(settings)
    log = EventLog(tmp_path / "events" / "events.jsonl", clock=lambda: 0.0)
    log.note("begun", config=settings)
    log.note("published", manifest=WeightManifest(0, "", 0, (), (7,), "f0"))
    log.note("finished", version=1, tokens=3, samples=1, optim=OptimReport(True, 1.0, 0.1))
    log.note("published", manifest=WeightManifest(1, "", 0, (), (8,), "f1"))
    log.close()
    return tmp_path


def said(capsys, status, *arguments):
    assert main(["replay", *map(str, arguments)]) == status
    return capsys.readouterr().err


def test_a_folder_that_is_no_run_is_a_mistake_of_usage(tmp_path, capsys):
    assert "no run folder: it has no config.yaml" in said(capsys, 2, tmp_path)


def test_a_run_without_events_names_the_setting_that_records_them(run_folder, capsys):
    (run_folder / "events" / "events.jsonl").unlink()
    assert "observe.events" in said(capsys, 2, run_folder)


def test_settings_that_were_changed_after_the_run_are_refused(run_folder, capsys):
    file = run_folder / "config.yaml"
    file.write_text(file.read_text().replace("lr: 0.0002", "lr: 0.0003"))
    assert "was changed after the run had begun" in said(capsys, 2, run_folder)


def test_more_steps_than_have_samples_are_refused(run_folder, capsys):
    (run_folder / "events" / "step_000000_replica_0.npz").touch()
    assert f"--steps 2: {run_folder} has 1 recorded steps" in said(capsys, 2, run_folder, "--steps", "2")


def test_a_record_without_any_samples_is_refused(run_folder, capsys):
    assert "no step" in said(capsys, 2, run_folder)


def test_a_torn_record_is_named_with_its_line(run_folder, capsys):
    file = run_folder / "events" / "events.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + "{\n" + "".join(lines[1:]))
    assert "line 2 is torn" in said(capsys, 1, run_folder)


def grow(folder, versions, summary=True):
    """More steps for the record, each with its samples, and what the run said of them."""
    log = EventLog(folder / "events" / "events.jsonl", clock=lambda: 0.0)
    for version in range(2, versions + 1):
        log.note("finished", version=version, tokens=3, samples=1, optim=OptimReport(True, 1.0, 0.1))
        log.note("published", manifest=WeightManifest(version, "", 0, (), (8,), f"f{version}"))
    log.close()
    for step in range(versions):
        (folder / "events" / f"step_{step:06d}_replica_0.npz").touch()
    (folder / "metrics.jsonl").write_text("{}\n" * versions)
    if summary:
        (folder / "summary.json").write_text(json.dumps({"steps": versions}))


def test_samples_that_are_missing_in_the_middle_are_named(run_folder, capsys):
    grow(run_folder, 5)
    assert open_run(run_folder)[1].damage == ""
    (run_folder / "events" / "step_000002_replica_0.npz").unlink()
    text = said(capsys, 1, run_folder)
    assert "step_000002_replica_0.npz is missing" in text and "--steps 2 repeats" in text


def test_samples_that_end_early_are_no_damage(run_folder):
    grow(run_folder, 5)
    for step in (3, 4):
        (run_folder / "events" / f"step_{step:06d}_replica_0.npz").unlink()
    _, record, there = open_run(run_folder)
    assert (there, record.damage) == (3, "")


def test_events_that_are_missing_in_the_middle_are_an_error(run_folder, capsys):
    grow(run_folder, 5)
    file = run_folder / "events" / "events.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"finished","version":3' not in line))
    assert "events of version 3 are missing" in said(capsys, 1, run_folder)


def test_a_torn_record_of_a_run_that_ended_is_not_whole(run_folder, capsys):
    grow(run_folder, 5)
    file = run_folder / "events" / "events.jsonl"
    file.write_bytes(file.read_bytes()[: -(len(file.read_bytes()) // 4)])
    there = open_run(run_folder)[2]
    text = said(capsys, 1, run_folder)
    assert f"ends in the middle of step {there + 1}; the run made 5 steps" in text and f"--steps {there}" in text


def test_a_torn_record_of_a_run_that_was_killed_is_repeated_and_the_words_say_how_far_it_goes(run_folder):
    grow(run_folder, 5, summary=False)
    file = run_folder / "events" / "events.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    _, record, there = open_run(run_folder)
    assert (there, record.damage) == (4, "")
    assert record.extent().startswith("the record ends in the middle of step 5; the run made 5 steps; the run")


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_a_number_of_steps_is_at_least_one(run_folder, capsys, count):
    assert "--steps" in said(capsys, 2, run_folder, f"--steps={count}")


def command(*arguments):
    return [sys.executable, "-m", "mindspeed_asyncflow", *map(str, arguments)]


def replayed(folder, *more):
    done = subprocess.run(command("replay", folder, *more), cwd=ROOT, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_an_asynchronous_run_that_lost_a_replica_is_repeated_bit_for_bit_and_a_changed_record_is_found(tmp_path):
    folder, output = tmp_path / "run", tmp_path / "out.txt"
    settings = [
        *("trainer.steps=5", "workflow.groups_per_step=8", "workflow.max_lag=1", "rollout.replicas=2"),
        *("evaluation.prompts=0", "run.seed=0"),
    ]
    config = ROOT / "configs" / "debug" / "reference_engine.yaml"
    arguments = [config, "--run-folder", folder, *(part for s in settings for part in ("--set", s))]
    with output.open("w") as file:
        run = subprocess.Popen(command("train", *arguments), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 200
    while "step 1/5" not in output.read_text():
        assert run.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)
    kill(int(re.search(r"rollout1 is process (\d+)", (folder / "log.txt").read_text())[1]), signal.SIGKILL)
    assert run.wait(200) == 0, output.read_text()
    assert '"kind":"lost","replica":1' in (folder / "events" / "events.jsonl").read_text()

    status, text = replayed(folder)
    assert (status, "5 of 5 recorded versions repeated bit for bit" in text) == (0, True), text

    samples = folder / "events" / "step_000001_replica_0.npz"
    with np.load(samples) as file:
        arrays = {name: file[name].copy() for name in file.files}
    arrays["value.advantage"] *= np.float32(1.5)
    np.savez(samples, **arrays)
    status, text = replayed(folder, "--out", tmp_path / "again", "--steps", "3")
    assert status == 1, text
    assert "differs: version 2, chunk" in text and "1 versions before it repeated" in text
    assert not (folder / "dock.json").exists() and not (tmp_path / "again" / "dock.json").exists()
