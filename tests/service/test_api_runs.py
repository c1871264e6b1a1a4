"""Whole runs that somebody drives from outside, without HTTP: real Ray, real processes, real trainer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_asyncflow.cli.audit import audit_run

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """What the client saw in both lives of one run: stopped in the middle by itself, and gone on to its end."""
    folder, found = tmp_path_factory.mktemp("driven"), []
    for life, code in (("first", 130), ("second", 0)):
        command = [sys.executable, str(HERE / "drive_run.py"), str(folder), life]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        found.append(json.loads((folder / f"{life}.json").read_text()))
    return folder / "run", *found


def test_calls_before_the_run_and_of_others_are_refused_and_change_nothing(lives):
    _, first, second = lives
    assert first["early"] == [409, "not_initialised"] and first["bad_key"] == [422, "settings"]
    assert first["second_owner"] == [409, "engines_in_use"] and first["bob_stops"] == [404, "no_run"]
    assert second["late"] == [409, "ended"]


def test_phases_are_told_and_then_what_a_client_needs_to_know(lives):
    _, first, _ = lives
    *phases, ready = first["init"]
    assert "starting Ray" in [said["phase"] for said in phases]
    assert ready["ready"] and ready["version"] == 0 and ready["steps"] == 9
    assert (ready["groups_per_step"], ready["group_size"]) == (4, 4)


def test_replicas_get_a_version_when_the_client_asks_for_it(lives):
    _, first, _ = lives
    assert first["kept_back"] == 0
    assert first["notified"]["version"] == 1 and set(first["notified"]["replicas"].values()) == {1}
    assert first["status"]["published"] == first["status"]["version"] == 2


def test_evaluation_checkpoint_and_export_come_while_the_run_waits_for_prompts(lives):
    run, first, _ = lives
    assert first["evaluated"] == 1 and first["checkpoint"]["step"] == 1 and first["exported"]["version"] == 1
    assert (Path(first["exported"]["path"]) / "model.safetensors").stat().st_size > 0
    assert Path(first["checkpoint"]["path"]).is_relative_to(run)


def test_answers_from_outside_are_trained_in_the_place_of_prompts(lives):
    run, first, _ = lives
    count = first["trajectories"]["accepted"]
    lines = [json.loads(line) for line in (run / "prompts.jsonl").read_text().splitlines()]
    assert ["given" in line for line in lines[4 : 4 + count]] == [True] * count
    assert first["status"]["samples"]["trained"] == 2 * 4 * 4 and not first["status"]["samples"]["dropped"]


def test_another_tenant_has_rows_of_its_own(lives):
    _, first, _ = lives
    assert first["bob"]["accepted"] == 1 and len(set(first["bobs_rows"])) == 1
    assert first["status"]["prompts"]["accepted"] == 12


def test_a_run_that_its_client_stopped_goes_on_and_trains_every_prompt_once(lives):
    """The second life begins at the checkpoint of step 1: step 2 and what was queued are done again."""
    run, first, second = lives
    assert first["stopped"]["exit_code"] == 130 and "stopped by its client" in first["stopped"]["error"]
    ready = second["init"][-1]
    assert ready["version"] == 1 and ready["accepted"] == 12
    assert second["put"]["first"] == 12 and second["steps"] == [0, 1, 2, 3]
    assert second["stopped"]["exit_code"] == 0 and not second["stopped"]["error"]
    found = audit_run(run)
    assert found.holds, found.wrong
    assert (found.trained, found.steps, found.open, found.resumes) == (4 * 4 * 4, 4, 0, 1)
