"""README.md and README.zh-CN.md say the same, and the figures are those of benchmarks/README.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
SPEED = ENGLISH.split("## How fast\n")[1].split("\n## ")[0]


def tables(text: str) -> list[int]:
    """Rows of each table."""
    return [len(table.splitlines()) for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


@pytest.mark.parametrize(
    "pattern",
    [r"`([^`\n]+)`", r"\]\(([^)]+)\)", r"^```.*?^```", r"\d+(?:[.,]\d+)*"],
    ids=["code", "links", "blocks", "numbers"],
)
def test_both_languages_have_the_same(pattern):
    found = [sorted(re.findall(pattern, text, re.DOTALL | re.MULTILINE)) for text in (ENGLISH, CHINESE)]
    other_language = {"README.md", "README.zh-CN.md"}
    assert [x for x in found[0] if x not in other_language] == [x for x in found[1] if x not in other_language]


def test_both_languages_have_the_same_headings_and_tables():
    assert tables(CHINESE) == tables(ENGLISH)
    headings = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in (ENGLISH, CHINESE)]
    assert headings[0] == headings[1]


@pytest.mark.parametrize("line", [line for line in SPEED.splitlines() if line.endswith("` |") or "the same |" in line])
def test_every_figure_of_speed_stands_in_the_page_of_the_benchmarks(line):
    measured = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    figures = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)", line.strip("|").split(" | ")[1])
    assert figures and [f for f in figures if not re.search(rf"(?<![\d.]){re.escape(f)}(?!\d|\.\d)", measured)] == []


def test_scripts_that_repeat_a_figure_exist():
    scripts = re.findall(r"`(benchmarks/\w+\.py)", SPEED)
    assert len(scripts) > 7 and [name for name in scripts if not (ROOT / name).is_file()] == []


def test_that_nothing_ran_on_a_device_is_said_at_the_top_and_over_the_table():
    for text, said, table in (
        (ENGLISH, "Nothing was run on an NPU", "not run"),
        (CHINESE, "没有任何部分在 NPU 上运行过", "未运行过"),
    ):
        assert said in text.split("\n## ")[0]
        head = next(line for line in text.splitlines() if line.startswith("|") and "CPU" in line and " NPU" in line)
        assert table in head
