from pathlib import Path

from mindspeed_asyncflow.config.keys import settings_page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_documented_settings_are_those_of_the_schema():
    assert PAGE.read_text(encoding="utf-8") == settings_page()
