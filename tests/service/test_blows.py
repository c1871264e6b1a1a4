"""Chaos over a stand-in for a run: a driver that replaces its worker and writes a step every 10 ms."""

import itertools
import json
import random
import sys

import psutil
import pytest

from mindspeed_asyncflow.cli.chaos import figures, table
from mindspeed_asyncflow.errors import AsyncFlowError, DeadlineExceeded
from mindspeed_asyncflow.observe.audit import Audit
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service import chaos
from mindspeed_asyncflow.service.chaos import Blow, Chaos

STAND_IN = r"""
import json, os, subprocess, sys, time
folder, steps, keeps = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def worker():  # ends with its driver, unless the stand-in is to leave it behind
    code = "import os, time\nparent = os.getppid()\nwhile %s or os.getppid() == parent: time.sleep(0.02)" % keeps
    child = subprocess.Popen([sys.executable, "-S", "-c", code])
    table = {name: {"pid": pid, "host": "here"} for name, pid in (("driver", os.getpid()), ("worker0", child.pid))}
    with open(folder + "/new", "w") as file:
        json.dump(table, file)
    os.replace(folder + "/new", folder + "/processes.json")
    return child
def stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"
child = worker()
done = sum(1 for _ in open(folder + "/metrics.jsonl")) if os.path.exists(folder + "/metrics.jsonl") else 0
for step in range(done, steps):
    if child.poll() is not None or stopped(child.pid):
        child.kill()
        child.wait()
        child = worker()
    time.sleep(0.01)
    with open(folder + "/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "time": time.time()}) + "\n")
child.kill()
"""


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    for name, seconds in (("LOOK_S", 0.01), ("PAUSE_S", 0.1), ("END_S", 1.0), ("FROZEN_S", 0.3)):
        monkeypatch.setattr(chaos, name, seconds)


def strike(tmp_path, kills, *, code=STAND_IN, keeps=False, seed=0, steps=150, only=(), patience_s=30.0):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir(exist_ok=True)

    def command(count):
        return [sys.executable, "-S", "-c", code, str(tmp_path), str(count), str(keeps)]

    made = Chaos(command, folder, steps, seed, only=only, patience_s=patience_s, say=lambda words: None)
    made.run(kills)
    return made


@pytest.mark.slow
def test_each_component_is_killed_and_frozen_once_before_any_comes_again_and_all_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(random.Random, "uniform", lambda self, low, high: high)
    made = strike(tmp_path, 4)
    assert {(b.component, b.how) for b in made.blows} == set(
        itertools.product(["driver", "worker"], ["kill", "freeze"])
    )
    assert [b for b in made.blows if b.seconds is None] == []
    assert [(b.name, b.how) for b in made.blows if b.ended] == [("driver", "kill")] and made.ends == 1
    assert (made.left_processes, made.left_files) == ([], [])
    frozen = next(b for b in made.blows if (b.component, b.how) == ("driver", "freeze"))
    assert frozen.seconds > chaos.FROZEN_S


@pytest.mark.slow
def test_a_seed_fixes_who_is_struck_and_how(tmp_path):
    orders = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        made = strike(tmp_path / name, 2, seed=5, only=("worker",))
        orders.append([(b.name, b.how) for b in made.blows])
    assert orders[0] == orders[1]


@pytest.mark.slow
def test_what_outlives_the_run_is_counted_named_and_ended(tmp_path):
    made = strike(tmp_path, 2, keeps=True, only=("driver",))
    (left,) = made.left_processes
    pid = int(left.split()[0])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_run_that_is_complete_too_early_goes_on_with_more_steps(tmp_path):
    made = strike(tmp_path, 3, steps=10, only=("worker",))
    assert len(made.blows) == 3 and made.steps > 10
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(made.steps))


def test_a_component_that_the_run_has_not_is_named_and_ends_it(tmp_path):
    with pytest.raises(AsyncFlowError, match="--only rolout: this run has driver, worker"):
        strike(tmp_path, 1, only=("rolout", "worker"))


def test_a_run_that_never_makes_a_step_is_given_up_with_its_last_words(tmp_path):
    with pytest.raises(AsyncFlowError, match=r"(?s)3 times in a row without a step.*ValueError: broken"):
        strike(tmp_path, 1, code="raise ValueError('broken')")


def test_a_run_that_hangs_is_given_up_and_ended(tmp_path):
    with pytest.raises(DeadlineExceeded, match=r"no step for 0\.5 s"):
        strike(tmp_path, 1, code="import time; time.sleep(60)", patience_s=0.5)


def test_figures_are_medians_by_component_and_count_what_is_wrong():
    audit = Audit()
    audit.wrong["lost"] = ["group 1"]
    audit.wrong["order"] = ["group 2", "group 3"]
    blows = [
        Blow("rollout0", "kill", seconds=2.0),
        Blow("rollout1", "freeze", seconds=4.0),
        Blow("driver", "kill", end_s=1.0),
    ]
    found = figures(blows, audit, ["7 left"], [], "")
    columns = ("kills", "freezes", "ended_the_run", "end_s_max", "recovery_s_median", "recovery_s_max")
    assert found["components"] == {
        "driver": dict(zip(columns, (1, 0, 1, 1.0, None, None))),
        "rollout": dict(zip(columns, (1, 1, 0, None, 3.0, 4.0))),
    }
    assert (found["kills"], found["lost"], found["trained_twice"], found["law_violations"]) == (3, 1, 0, 2)
    assert (found["leftover_processes"], found["leftover_files"], found["not_finished"]) == (1, 0, 0)
    assert len({len(line) for line in table(found).splitlines()}) == 1
