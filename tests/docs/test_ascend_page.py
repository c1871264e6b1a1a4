"""docs/ascend.md names settings, files and options that exist, and says of every trap and feature what it must."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from mindspeed_asyncflow import cli
from mindspeed_asyncflow.config import keys, load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/ascend.md").read_text(encoding="utf-8")
SECTION_4 = ("placement.rollout_python=$ROLLOUT/bin/python",)
SECTIONS = "run|model|data|algorithm|trainer|rollout|workflow|placement|cluster|dock|reward"


def rows(title: str) -> list[list[str]]:
    """Cells of the table behind a heading, without its first two lines."""
    part = PAGE.split(f"## {title}\n", 1)[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """(file, settings) of each command of the page that checks or runs a configuration; settings that stand alone come
    behind the command of section 4."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.S | re.M)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    texts = [*lines, *re.findall(r"`([^`\n]+)`", PAGE)]
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    for words in (shlex.split(text, comments=True) for text in texts if re.search("--set|check |launch_", text)):
        alone, launched = words[0] == "--set", "scripts/launch_qwen_grpo.sh" in words
        if not (alone or launched or words[0].endswith("asyncflow")) or "FILE" in words:
            continue
        settings = tuple(after for word, after in pairwise(words) if word == "--set")
        named = [word for word in words if word.startswith("configs/")]
        found[(*named, "configs/qwen_tiny_npu.yaml")[0], (*(SECTION_4 if alone else ()), *settings)] = None
    return list(found)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "settings"), commands())
def test_every_command_passes_check(capsys, monkeypatch, file, settings):
    monkeypatch.chdir(ROOT)
    here = [setting.replace("DATA/Qwen2.5-7B", "configs/models/qwen2.5-7b") for setting in settings]
    overrides = [word for setting in here for word in ("--set", setting)]
    devices = max(16, load_config(file).cluster.devices)
    status = cli.main(["check", file, *overrides, "--platform", "npu", "--assume-devices", str(devices)])
    assert status == 0, capsys.readouterr()


def test_commands_of_the_page_are_found():
    found = commands()
    assert ("configs/qwen_tiny_npu.yaml", SECTION_4) in found, "section 4"
    assert (
        "configs/qwen_tiny_npu.yaml",
        (*SECTION_4, "trainer.data_parallel=2", "workflow.groups_per_step=32"),
    ) in found
    assert ("configs/ascend/qwen2.5-32b-colocated.yaml", ()) in found and len(found) > 12


def test_every_setting_that_is_named_exists():
    known = {doc.path for doc in keys.describe_keys()}
    named = set(re.findall(rf"(?<![\w/])(?:{SECTIONS})\.[a-z0-9_]+(?:\.[a-z0-9_*]+)*\*?", PAGE))
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
    ways = ("twin", "emulated", "source", "refused, with the reason", "not verifiable here", "arithmetic")
    assert checked.startswith((*ways, "files are read", "the vendor's compiler"))
    assert len(command) > 3


def test_the_page_says_first_that_nothing_ran_on_an_npu():
    assert "Nothing of this project has run on an NPU" in PAGE.split("\n## ")[0]
