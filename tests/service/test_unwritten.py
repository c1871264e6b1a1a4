"""Disks that are full, folders that cannot be written, and a wall clock that jumps."""

import errno
import os
import resource
from pathlib import Path

import pytest

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.service.unwritten import in_words
from tests.service.test_launch import DEFAULT, ENDLESS, ROOT, SMALL, Job, balanced, finished, metrics


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_an_error_of_writing_names_the_folder_and_how_to_go_on(tmp_path, number):
    said = in_words(OSError(number, os.strerror(number)), tmp_path)
    assert isinstance(said, PlatformError)
    for words in (f"cannot write to {tmp_path}", os.strerror(number), "MiB free", f"--run-folder {tmp_path}"):
        assert words in str(said)
    elsewhere = in_words(OSError(number, os.strerror(number), str(tmp_path / "not" / "there")), tmp_path)
    assert f"cannot write to {tmp_path / 'not' / 'there'}" in str(elsewhere)


def test_other_errors_stay_what_they_are(tmp_path):
    for error in (OSError(errno.ECONNRESET, "reset"), ValueError("no")):
        assert in_words(error, tmp_path) is error


@pytest.mark.slow
def test_a_run_that_may_write_no_more_ends_with_words_and_leaves_nothing(tmp_path):
    """The driver's files may not grow any more, as on a full disk."""
    job = Job(tmp_path / "runs", DEFAULT, *ENDLESS)
    job.wait_for("step 1/")
    job.watch()
    size = (job.folder / "metrics.jsonl").stat().st_size
    resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (size, size))
    assert job.wait(120) == 1, job.text
    assert "cannot write to" in job.text and "File too large" in job.text and "--run-folder" in job.text
    assert "Traceback" not in job.text
    assert job.leftovers() == []


JUMPS = """
import os, time
real = time.time

def jumping():
    moment = real()
    return moment + (86400 if int(2 * moment) % 2 else -86400) if os.path.exists(os.environ["JUMPS"]) else moment

time.time = jumping
"""


@pytest.mark.slow
def test_a_wall_clock_that_jumps_by_days_changes_nothing(tmp_path, monkeypatch):
    """Twice a second, in every process of the run."""
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(JUMPS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "early"), str(ROOT)]))
    monkeypatch.setenv("JUMPS", str(tmp_path / "jumps"))
    job = Job(tmp_path / "runs", DEFAULT, *SMALL, "rollout.engine=reference", "trainer.steps=6")
    job.wait_for("step 1/")
    Path(tmp_path / "jumps").touch()
    summary = finished(job)
    times = [row["time"] for row in metrics(job)]
    assert max(times) - min(times) > 40000  # it did jump
    assert summary["steps"] == 6 and balanced(summary) and summary["samples_trained"] == 6 * 64
