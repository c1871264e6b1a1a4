"""Environments by name, and what is said about those that cannot be used."""

import pytest

from mindspeed_asyncflow.environments.base import EXAMPLE, Turn, build_environment
from mindspeed_asyncflow.errors import RewardError

ME = "python:tests.environments.samples"


def test_a_user_class_is_made_with_its_options():
    environment = build_environment(f"{ME}:Counter", {"until": 2})
    assert environment.reply([Turn("assistant", "a")], "", {}) == "1"
    assert environment.reply([Turn("assistant", "a")] * 2, "", {}) is None


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [("abacus", {}, "there are: calculator, reasoning_gym, python:MODULE:CLASS"),
     ("calculator", {"colour": 1}, "do not fit environment calculator"),
     (f"{ME}:Nothing", {}, "cannot be loaded"),
     ("python:no.such:Thing", {}, "cannot be loaded"),
     (f"{ME}:Deaf", {}, r"no method reply\(turns, truth, fields\)"),
     (f"{ME}:Curt", {}, r"no method reply\(turns, truth, fields\)")],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_the_setting(name, options, why):
    with pytest.raises(RewardError, match=why):
        build_environment(name, options)


def test_the_example_in_the_error_has_two_lines_and_works():
    space: dict = {}
    exec(EXAMPLE, space)
    assert EXAMPLE.count("\n") == 1
    assert space["Echo"]().reply([Turn("assistant", "a")], "", {}) == "a"
    with pytest.raises(RewardError, match="class Echo"):
        build_environment(f"{ME}:Deaf", {})
