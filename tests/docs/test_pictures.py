"""docs/pictures/ is what the simulated loops do today."""

import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts/docs/pictures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pictures"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pictures"]


def test_the_pictures_are_those_of_the_loops(pictures, tmp_path):
    pictures.main(tmp_path)
    drawn = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    kept = {file.name: file.read_text(encoding="utf-8") for file in pictures.FOLDER.glob("schedule-*.svg")}
    changed = sorted(name for name in drawn.keys() | kept.keys() if drawn.get(name) != kept.get(name))
    assert changed == [], "draw them again: .venv/bin/python scripts/docs/pictures.py"


def test_every_picture_is_well_formed_and_stands_on_a_page_with_words_for_it(pictures):
    page = (ROOT / "docs/staleness.md").read_text(encoding="utf-8")
    for name in pictures.PICTURES:
        ElementTree.parse(pictures.FOLDER / f"schedule-{name}.svg")
        assert f"](pictures/schedule-{name}.svg)" in page and f"![](pictures/schedule-{name}.svg)" not in page


@pytest.mark.parametrize(("name", "lag"), [("one-at-a-time", 0), ("streamed", 0), ("colocated", 0), ("lag-1", 1)])
def test_the_lag_that_a_picture_shows_is_the_bound_of_its_schedule(pictures, name, lag):
    _, oldest = pictures.events_of(pictures.PICTURES[name][1])
    assert max(step - version for step, version in enumerate(oldest)) == lag
