from pathlib import Path

import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.keys import choices, settings_page
from mindspeed_asyncflow.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_documented_settings_are_those_of_the_schema():
    assert PAGE.read_text(encoding="utf-8") == settings_page()


@pytest.mark.parametrize("path", choices())
def test_every_word_that_is_offered_for_a_setting_is_taken_and_no_other(path):
    for word in choices()[path]:
        parse_config("", [f"{path}={word}"])
    with pytest.raises(ConfigError, match=path):
        parse_config("", [f"{path}=something"])
