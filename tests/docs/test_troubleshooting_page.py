"""Messages on docs/troubleshooting.md are ones that the program can say, and settings there exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from mindspeed_asyncflow.config.keys import all_paths, sections
from mindspeed_asyncflow.observe.metrics import BY_NAME

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CAUSES, LOOKS = PAGE.split("## It runs, but")
ROWS = [line.strip("|").split(" | ") for line in CAUSES.splitlines() if line.startswith("| `")]


@cache
def said() -> str:
    """Every text of the package, with … where a value is put in, and the scripts."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.sh")]
    for path in (ROOT / "mindspeed_asyncflow").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_every_message_is_one_of_the_program_and_has_a_cause_and_a_fix(row):
    message, cause, fix = row
    quoted = re.match(r" ?`([^`]+)`", message)[1]
    parts = [part.strip() for part in quoted.split("…") if part.strip()]
    assert parts and [part for part in parts if part not in said()] == []
    assert len(cause) > 10 and len(fix.strip()) > 5


def test_every_setting_and_metric_that_is_named_exists():
    groups = "|".join(sections())
    named = set(re.findall(rf"`(?:--set )?((?:{groups})\.[a-z_]+(?:\.[a-z_]+)*)[`:=]", PAGE))
    assert len(named) > 20 and named <= set(all_paths())
    metrics = set(re.findall(r"`([a-z_]+/[a-z_]+)`", LOOKS))
    assert metrics and metrics <= set(BY_NAME)
