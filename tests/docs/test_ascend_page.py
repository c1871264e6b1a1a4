"""docs/ascend.md names settings, files and options that exist, and says of every trap and feature what it must."""

import re
from pathlib import Path

import pytest

from mindspeed_asyncflow.config import keys

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/ascend.md").read_text(encoding="utf-8")
SECTIONS = "run|model|data|algorithm|trainer|rollout|workflow|placement|cluster|dock|reward"


def rows(title: str) -> list[list[str]]:
    """Cells of the table behind a heading, without its first two lines."""
    part = PAGE.split(f"## {title}\n", 1)[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_setting_that_is_named_exists():
    known = {doc.path for doc in keys.describe_keys()}
    named = set(re.findall(rf"(?<![\w/])(?:{SECTIONS})\.[a-z_]+(?:\.[a-z_*]+)*\*?", PAGE))
    assert len(named) > 15
    for key in named:
        prefix = key.partition("*")[0]
        assert any(path == key or ("*" in key and path.startswith(prefix)) for path in known), key


def test_every_file_of_the_project_that_is_named_exists():
    named = set(
        re.findall(r"(?<![\w/])(?:configs|scripts|tests|examples|benchmarks|mindspeed_asyncflow|docs)/[\w./-]+", PAGE)
    )
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name.rstrip(".")).exists()] == []


def test_every_option_of_the_launch_script_is_one():
    script = (ROOT / "scripts/launch_qwen_grpo.sh").read_text()
    named = {o for line in PAGE.splitlines() if "launch_qwen_grpo" in line for o in re.findall(r"--[a-z-]+", line)}
    assert named and [option for option in named if option not in script] == []


def test_all_traps_are_listed_with_what_is_done_about_them():
    traps = rows("7. Known traps")
    assert [int(trap[0]) for trap in traps] == list(range(1, 20))
    assert all(len(trap) == 3 and len(trap[2]) > 10 for trap in traps)


@pytest.mark.parametrize("row", rows("Status"), ids=lambda row: row[0][:40])
def test_every_feature_says_how_it_was_checked_and_what_settles_it(row):
    _, checked, command = row
    assert re.match(
        r"twin|emulated|source|not verifiable here|arithmetic|files are read|the vendor's compiler", checked
    )
    assert len(command) > 3


def test_the_page_says_first_that_nothing_ran_on_an_npu():
    assert "Nothing of this project has run on an NPU" in PAGE.split("\n## ")[0]
