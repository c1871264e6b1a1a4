import subprocess
import sys

import pytest

from mindspeed_asyncflow.config.schema import DataConfig
from mindspeed_asyncflow.data.gym import ReasoningGym
from mindspeed_asyncflow.data.sources import make_sources
from mindspeed_asyncflow.data.tasks import Demonstrating, Task, build_task
from mindspeed_asyncflow.errors import DataError


def test_the_settings_name_a_task():
    (source,) = make_sources(DataConfig()).train
    task = source.task
    assert task.name == "sort4" and isinstance(task, Task) and isinstance(task, Demonstrating)


@pytest.mark.parametrize("name", ["sort6", "file:", "file", "jsonl:rows.jsonl", "python:os", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(DataError, match="sort4, sort5, sort_long, chain_sum, reasoning_gym:DATASET, file:PATH"):
        build_task(name, {})


def test_options_that_a_task_does_not_have_are_refused():
    with pytest.raises(DataError, match=r"data\.options .*length"):
        build_task("sort4", {"length": 5})


@pytest.mark.parametrize("name", ["python:no_such_module:Task", "python:json:NoSuchTask"])
def test_a_user_class_that_cannot_be_loaded_is_named(name):
    with pytest.raises(DataError, match=name):
        build_task(name, {})


def test_a_missing_library_names_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"mindspeed_asyncflow\[tasks\]"):
        ReasoningGym("gcd")


def test_tasks_load_without_heavy_libraries():
    code = (
        "import sys, mindspeed_asyncflow.data.tasks\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
