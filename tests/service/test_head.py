"""Ray's head dies or freezes, and the driver dies or is stopped."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from mindspeed_asyncflow.service.head import FROZEN_LOOKS, PING_EVERY, SILENT_PINGS, HeadWatch
from tests.service.test_launch import DEFAULT, ENDLESS, Job


@pytest.fixture
def daemon():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


def answers(limit_s):
    pass


def test_a_daemon_that_lives_is_not_lost_and_one_that_died_is_named(daemon):
    watch = HeadWatch({"gcs_server": daemon.pid}, answers)
    assert all(watch.look() == "" for _ in range(3 * FROZEN_LOOKS))
    daemon.kill()
    daemon.wait()
    assert f"gcs_server (process {daemon.pid}) died" in watch.look()


def test_a_daemon_is_frozen_only_when_it_stays_stopped(daemon):
    watch = HeadWatch({"raylet": daemon.pid}, answers)
    for _ in range(2):  # it went on in between
        _stop(daemon)
        assert [watch.look() for _ in range(FROZEN_LOOKS - 1)] == [""] * (FROZEN_LOOKS - 1)
        daemon.send_signal(signal.SIGCONT)
        _until(daemon, lambda state: state != psutil.STATUS_STOPPED)
        assert watch.look() == ""
    _stop(daemon)
    assert f"raylet (process {daemon.pid}) is frozen" in [watch.look() for _ in range(FROZEN_LOOKS)][-1]


def test_a_daemon_that_freezes_as_the_run_ends_is_continued_so_that_it_can_be_ended(daemon):
    watch = HeadWatch({"raylet": daemon.pid, "gcs_server": 2**22 + 1}, answers)
    _stop(daemon)
    watch.stop()
    _until(daemon, lambda state: state != psutil.STATUS_STOPPED)


def _stop(daemon):
    daemon.send_signal(signal.SIGSTOP)
    _until(daemon, lambda state: state == psutil.STATUS_STOPPED)


def _until(daemon, holds):
    while not holds(psutil.Process(daemon.pid).status()):
        time.sleep(0.01)


def test_a_head_without_daemons_here_is_lost_when_it_answers_no_ping_in_a_row():
    unanswered = iter([True, False] + [True] * SILENT_PINGS)

    def ping(limit_s):
        if next(unanswered):
            raise TimeoutError

    watch = HeadWatch({}, ping)
    said = [watch.look() for _ in range(PING_EVERY * (2 + SILENT_PINGS))]
    assert said[:-1] == [""] * (len(said) - 1) and "has not answered" in said[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("gcs_server", signal.SIGSTOP), ("raylet", signal.SIGKILL)])
def test_a_run_without_rays_head_ends_within_15_s_and_leaves_nothing(tmp_path, name, number):
    job = Job(tmp_path / "runs", DEFAULT, *ENDLESS)
    job.wait_for("step 1/")
    job.watch()
    [victim] = [p for p in job.seen.values() if p.name() == name]
    [logs] = [a for a in victim.cmdline() if "session_" in a and a.startswith(("--log_dir=", "--session_dir="))][:1]
    folder = logs.partition("=")[2].partition("/session_")[0]
    assert os.path.isdir(folder)
    victim.send_signal(number)
    assert job.wait(15) == 1, job.text
    assert f"Ray's {name}" in job.summary["error"] and f"Ray's {name}" in job.text
    assert job.leftovers() == [] and not os.path.exists(folder)
