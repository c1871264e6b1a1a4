"""What a Python environment has, and whether its processes can work with those of the run."""

import sys
import time

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.pythons import Environment, check_together, probe, pythons

OWN = Environment("3.11.7", {"ray": "2.60.0", "torch": "2.7.1"})
KEY = "placement.rollout_python"


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_probe_says_what_this_environment_has():
    found = probe(sys.executable)
    assert found.python == "{}.{}.{}".format(*sys.version_info) and found.missing == ()
    assert found.versions["ray"] and found.versions["torch"] and "torch" in str(found)


def test_a_python_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PlatformError, match="none/bin/python does not exist"):
        probe("none/bin/python")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match="file is no program"):
        probe(str(tmp_path / "file"))


@pytest.mark.parametrize(
    "text, said",
    [
        ("echo lost >&2; exit 3", "lost$"),
        ("printf 'first\\nsecond\\nlast\\n' >&2; exit 3", r"first \.\.\. last$"),
        ("printf '%900s' x >&2", "^.{0,400}$"),
        ("exit 0", "does not print what it is asked for"),
        ("echo 5", "does not print what it is asked for"),
        ("cat", "does not print what it is asked for"),  # it has no input to wait for
    ],
)
def test_a_program_that_is_no_python_is_named_with_its_first_and_last_words(tmp_path, text, said):
    with pytest.raises(PlatformError, match=said) as error:
        probe(script(tmp_path / "odd", text))
    assert "odd does not work as a Python: " in str(error.value)


@pytest.mark.parametrize("text", ["exec sleep 20", "sleep 20\nexit 0"])
def test_a_python_that_hangs_is_given_up_with_what_it_started(tmp_path, text):
    began = time.monotonic()
    with pytest.raises(PlatformError, match=r"did not answer within 0\.2 s"):
        probe(script(tmp_path / "slow", text), timeout_s=0.2)
    assert time.monotonic() - began < 5


def test_another_torch_and_another_patch_release_of_python_are_welcome():
    check_together(OWN, {KEY: Environment("3.11.9", {"ray": "2.60.0", "torch": "2.10.0", "numpy": "1.26.4"})})


@pytest.mark.parametrize(
    "there, said",
    [
        (Environment("3.10.13", {"ray": "2.60.0"}), r"has Python 3\.10, the run itself has Python 3\.11"),
        (Environment("3.11.7", {"ray": "2.59.1"}), r"has Ray 2\.59\.1, the run itself has Ray 2\.60\.0"),
        (Environment("3.11.7", {}, ("ray", "pydantic")), "ray, pydantic cannot be imported there"),
        (Environment("3.10.13", {}, ("ray", "pydantic")), r"has Python 3\.10"),  # what lacks there is no matter yet
    ],
)
def test_what_cannot_work_together_is_refused_with_setting_node_and_both_versions(there, said):
    with pytest.raises(PlatformError, match=f"{KEY} on node 10.0.0.7.*{said}" if "has" in said else said) as error:
        check_together(OWN, {KEY: there}, " on node 10.0.0.7")
    assert KEY in str(error.value)


def test_paths_are_made_absolute_and_names_are_left_to_each_node(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/h")
    config = parse_config("", ["placement.trainer_python=~/e/bin/python", "placement.rollout_python=e/bin/python"])
    wanted = {"placement.trainer_python": "/h/e/bin/python", "placement.rollout_python": str(tmp_path / "e/bin/python")}
    assert pythons(config) == wanted
    assert pythons(parse_config("", ["placement.rollout_python=python3.11"])) == {KEY: "python3.11"}
    assert pythons(parse_config("")) == {}
