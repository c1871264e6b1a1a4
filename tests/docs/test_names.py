"""What the pages name exists: settings, and files of the project."""

import re
from pathlib import Path

import pytest

from mindspeed_asyncflow.config.keys import all_paths, sections

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md"]
KNOWN = {".".join(path.split(".")[:depth]) for path in all_paths() for depth in range(1, 9)}  # sections inside too
FOLDERS = "configs|scripts|tests|examples|benchmarks|mindspeed_asyncflow|docs|cann_kernels"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_setting_and_file_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    settings = set(re.findall(rf"`(?:--set )?((?:{'|'.join(sections())})\.[a-z_]+(?:\.[a-z_]+)*)(?=[`:=])", text))
    files = {name for name in settings if re.search(r"\.(py|yaml|jsonl?|sh|txt)$", name)}
    assert settings - files <= KNOWN
    paths = {path.rstrip("./") for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text)}
    if page.name != "recipes.md":  # it names files of the vendor's repository
        assert {path for path in paths if not (ROOT / path).exists()} == set()
