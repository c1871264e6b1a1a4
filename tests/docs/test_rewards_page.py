"""What docs/rewards.md names exists, and its examples do what it says."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import yaml

from mindspeed_asyncflow.config.keys import all_paths
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.code import Code, cases_of
from mindspeed_asyncflow.rewards.registry import SCORERS, Spec, build, build_scorer

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_every_scorer_has_a_row_with_all_its_options():
    rows = dict(re.findall(r"^\| `(\w+)` (.*)$", PAGE, re.MULTILINE))
    assert set(SCORERS) | {"task"} == rows.keys() - {"MODULE"}
    for name, make in SCORERS.items():
        options = set(inspect.signature(make).parameters) - {"timeout_s"}
        assert options <= set(re.findall(r"`(\w+)`", rows[name].rpartition("|")[0].rpartition("|")[2])), name


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_accepted(example):
    config = Config.model_validate(yaml.safe_load(example))
    assert build(Spec.of(config.data, config.reward)).parts


def test_the_users_function_works(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "my_scorers.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert build_scorer("my_scorers:score", {}, 5.0).score(Answer(" 4", "4", True)) == 1.0
    sys.modules.pop("my_scorers")


@pytest.mark.parametrize("truth", re.findall(r"^\| `(\{.*?\}|assert .*?)` \|", PAGE, re.MULTILINE))
def test_every_form_of_a_truth_is_a_test(truth):
    program = "def f(a, b): return a + b\nif __name__ == '__main__' and {printing}: print(int(input()) * 2)"
    program = program.format(printing="outputs" in truth and "fn_name" not in truth)
    assert cases_of(program, truth)
    assert Code().score(Answer(f"```python\n{program}\n```", truth, True)) == 1.0


def test_the_settings_that_the_page_names_are_there():
    assert set(re.findall(r"`(reward\.[a-z_]+)[`:]", PAGE)) <= set(all_paths())
