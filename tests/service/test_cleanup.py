import mmap
import subprocess
import sys
import time

import psutil
import pytest

from mindspeed_asyncflow.service import cleanup


@pytest.fixture
def shm(tmp_path, monkeypatch):
    monkeypatch.setattr(cleanup, "SHM", tmp_path)
    return tmp_path


def test_only_files_of_dead_drivers_are_removed(shm):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (shm / f"asyncflow-{dead.pid}-relay").touch()
    (shm / "asyncflow-1-arena").touch()
    (shm / "someone-elses").touch()
    assert cleanup.remove_stale(shm) == [f"asyncflow-{dead.pid}-relay"]
    assert sorted(p.name for p in shm.iterdir()) == ["asyncflow-1-arena", "someone-elses"]


def test_a_file_that_somebody_has_mapped_is_not_left_though_no_driver_of_its_number_lives_here(shm):
    """The driver of a run over several nodes lives on one of them."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    file = shm / f"asyncflow-{dead.pid}-arena1"
    file.write_bytes(bytes(4096))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4096):
        assert cleanup.remove_stale(shm) == [] and file.exists()
    assert cleanup.remove_stale(shm) == [file.name]


def test_a_model_that_somebody_has_put_into_shared_memory_is_not_the_runs(shm):
    (shm / "model").mkdir()
    for file in (shm / "model" / "weights", shm / "psm_1234"):
        file.write_bytes(bytes(4096))
    with (
        (shm / "model" / "weights").open("r+b") as one,
        (shm / "psm_1234").open("r+b") as other,
        mmap.mmap(one.fileno(), 4096),
        mmap.mmap(other.fileno(), 4096),
    ):
        assert cleanup.shared_files([psutil.Process()]) == {shm / "psm_1234"}


def test_own_files_are_removed_by_name_of_this_process(shm):
    mine = cleanup.shm_path("relay")
    open(mine, "w").close()
    cleanup.remove_own_shm()
    assert list(shm.iterdir()) == []


def test_a_process_that_ignores_the_request_to_end_is_killed():
    stubborn = subprocess.Popen(
        [sys.executable, "-c", "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]
    )
    killed = cleanup.end_processes([psutil.Process(stubborn.pid)], grace_s=0.2)
    assert len(killed) == 1 and killed[0].startswith(str(stubborn.pid))
    assert stubborn.poll() is not None


@pytest.mark.slow
def test_the_reaper_ends_marked_processes_when_the_driver_dies_without_cleaning(tmp_path):
    """B97: a driver that is killed; its orphan carries the mark and is ended, the scratch folder goes too, and what the
    orphan has mapped for a driver on another node."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    elsewhere = cleanup.SHM / f"asyncflow-test-{tmp_path.parent.name}-{tmp_path.name}"
    maps = (
        f"import mmap, os, time; name = {str(elsewhere)!r}; f = open(name, 'w+b'); f.write(bytes(4096)); f.flush(); "
        "m = mmap.mmap(f.fileno(), 4096); f.close(); g = open(name + '.journal', 'wb'); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    code = (
        "import subprocess, sys, pathlib, time\n"
        "from mindspeed_asyncflow.service import cleanup\n"
        "mark = cleanup.mark_environment()\n"
        f"cleanup.start_reaper(mark, pathlib.Path({str(scratch)!r}))\n"
        "open(cleanup.shm_path('x'), 'w').close()\n"
        f"subprocess.Popen([sys.executable, '-c', {maps!r}], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    orphan = psutil.Process(int(driver.stdout.readline()))
    driver.kill()
    driver.wait()
    gone, _ = psutil.wait_procs([orphan], timeout=15)
    assert gone == [orphan]
    deadline = time.monotonic() + 10
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not scratch.exists()
    assert not list(cleanup.SHM.glob(f"asyncflow-{driver.pid}-*")) and not elsewhere.exists()
    assert not elsewhere.with_name(elsewhere.name + ".journal").exists()
