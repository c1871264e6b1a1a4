"""A setting that was changed and that the others leave without effect is named, with the key that would give it one."""

import pytest

from mindspeed_asyncflow.config.rules_unused import rules
from mindspeed_asyncflow.config.schema import Config


def warned(sections):
    return {keys for level, keys, _ in rules(Config.model_validate(sections)) if level == "warning"}


@pytest.mark.parametrize(
    ("idle", "key", "used"),
    [
        ({"algorithm": {"gamma": 0.9}}, "algorithm.advantage", {"algorithm": {"advantage": "reinforce_pp"}}),
        ({"algorithm": {"gae_lambda": 0.9}}, "algorithm.advantage", {"algorithm": {"advantage": "gae"}}),
        ({"algorithm": {"whiten": False}}, "algorithm.advantage", {"algorithm": {"advantage": "gae"}}),
        ({"critic": {"lr": 0.1}}, "algorithm.advantage", {"algorithm": {"advantage": "gae"}}),
        ({"algorithm": {"dual_clip": 3.0, "loss": "cispo"}}, "algorithm.loss", {"algorithm": {"loss": "ppo_clip"}}),
        ({"algorithm": {"clip_high": 0.3, "loss": "sapo"}}, "algorithm.loss", {"algorithm": {"loss": "gspo"}}),
        ({"algorithm": {"dppo_cap": 3.0}}, "algorithm.loss", {"algorithm": {"loss": "dppo_tv"}}),
        (
            {"algorithm": {"loss_horizon": 9}},
            "algorithm.aggregation",
            {"algorithm": {"aggregation": "seq-mean-token-sum-norm"}},
        ),
        ({"algorithm": {"kl_type": "k2"}}, "algorithm.kl_coef", {"algorithm": {"kl_coef": 0.1}}),
        ({"correction": {"cap": 3.0}}, "correction.weight", {"correction": {"weight": "token"}}),
        ({"correction": {"reject_high": 3.0}}, "correction.reject", {"correction": {"reject": "token"}}),
        (
            {"correction": {"stale_power": 0.5}, "workflow": {"max_lag": 0}},
            "workflow.max_lag",
            {"workflow": {"max_lag": 1}},
        ),
        ({"reward": {"overlong_factor": 0.5}}, "reward.overlong_buffer", {"reward": {"overlong_buffer": 2}}),
        ({"turns": {"max_turns": 3}}, "turns.environment", {"turns": {"environment": "calculator"}}),
    ],
)
def test_what_has_no_use_is_named_until_the_setting_is_there_that_uses_it(idle, key, used):
    ((_, named),) = warned(idle)
    assert named == key
    sections = {name: {**idle.get(name, {}), **used.get(name, {})} for name in {*idle, *used}}
    assert not warned(sections)


def test_defaults_are_never_complained_about():
    assert not warned({})


def test_a_weight_in_validation_is_named_with_its_place():
    sources = [{"task": "sort4"}, {"task": "sort5", "weight": 2.0}]
    assert warned({"data": {"validation": sources}}) == {("data.validation[1].weight", "evaluation.prompts")}
