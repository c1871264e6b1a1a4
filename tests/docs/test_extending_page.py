"""The examples of docs/extending.md print what is printed there, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_asyncflow.data.tasks import build_task

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "printed"), EXAMPLES)
def test_examples_print_what_is_printed_there(example, printed):
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_the_example_task_is_one_that_settings_can_name(tmp_path, monkeypatch):
    (tmp_path / "my_tasks.py").write_text(EXAMPLES[0][0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    problems = build_task("python:my_tasks:Reverse", {"digits": 5}).problems(20, seed=1)
    assert len(problems) == 20 and all(p.text == p.truth[::-1] + ">" and len(p.truth) == 5 for p in problems)


def test_files_and_names_of_the_page_exist():
    places = set(
        re.findall(r"`((?:algorithms|data|rewards|environments|engines|config|service|platforms)/[\w./]*)`", PAGE)
    )
    assert len(places) > 10 and [p for p in places if not (ROOT / "mindspeed_asyncflow" / p).exists()] == []
    tests = set(re.findall(r"`((?:tests|cann_kernels)/[\w./]*)`", PAGE))
    assert tests and [p for p in tests if not (ROOT / p).exists()] == []
    code = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "mindspeed_asyncflow").rglob("*.py"))
    for name in ("ADVANTAGES", "LOSSES", "StepBackend", "SteppedEngine", "TrainEngine", "use_torch_for", "batch_level"):
        assert name in PAGE and re.search(rf"(?:class|def) {name}\b|^{name}\b", code, re.MULTILINE), name
