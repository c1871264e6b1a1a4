"""What does not go with a critic is refused with the settings that it would take."""

import pytest

from mindspeed_asyncflow.config import rules_critic
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError


def found(**sections):
    return [(level, keys) for level, keys, _ in rules_critic.rules(Config.model_validate(sections))]


GAE = {"advantage": "gae"}


@pytest.mark.parametrize(
    ("sections", "level", "key"),
    [
        ({"algorithm": GAE, "workflow": {"lend": True}}, "error", "workflow.lend"),
        ({"algorithm": GAE, "workflow": {"schedule": "colocated"}}, "error", "workflow.schedule"),
        ({"algorithm": GAE, "critic": {"warmup_steps": 60}}, "error", "critic.warmup_steps"),
        ({"algorithm": GAE, "critic": {"lr_warmup_steps": 60}}, "warning", "critic.lr_warmup_steps"),
    ],
)
def test_a_critic_and_what_it_does_not_go_with(sections, level, key):
    ((of_level, keys),) = found(**sections)
    assert of_level == level and keys[0] == key


def test_a_critic_as_it_comes_and_no_critic_are_fine():
    assert found(algorithm=GAE) == found() == []


def test_costs_of_a_critic_are_asked_of_nobody():
    rules_critic.refuse_priced(Config())
    with pytest.raises(ConfigError, match=r"algorithm.advantage"):
        rules_critic.refuse_priced(Config.model_validate({"algorithm": GAE}))
