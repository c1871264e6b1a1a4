"""What does not go together with an environment that answers the model."""

import pytest

from mindspeed_asyncflow.config.rules_turns import rules
from mindspeed_asyncflow.config.schema import Config


def found(environment="calculator", **sections):
    turns = {"environment": environment} | sections.pop("turns", {})
    return list(rules(Config.model_validate({"turns": turns} | sections)))


def test_the_defaults_fit():
    assert found() == []


@pytest.mark.parametrize("key, value", [("partial_rounds", 2), ("lend", True), ("repack_below", 4)])
def test_what_interrupts_answers_is_refused(key, value):
    ((level, keys, text),) = found(workflow={key: value})
    assert (level, keys) == ("error", (f"workflow.{key}", "turns.environment"))
    assert "starts again" in text
    assert not found(None, workflow={key: value})


def test_settings_that_cannot_hold_are_named():
    assert found(turns={"max_turns": 1})[0][1][0] == "turns.max_turns"
    ((level, _, text),) = found(turns={"max_turns": 5, "timeout_s": 30.0}, rollout={"timeout_s": 100.0})
    assert level == "warning" and "4 replies of 30 s each" in text
