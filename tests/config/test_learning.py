"""Rules between the settings of the mathematics: what cannot work is refused with the keys to turn."""

import pytest

from mindspeed_asyncflow.config.learning import rules
from mindspeed_asyncflow.config.schema import Config


def found(level, **sections):
    return [keys[0] for said, keys, _ in rules(Config.model_validate(sections)) if said == level]


NORM = {"aggregation": "seq-mean-token-sum-norm"}
KL = {"kl_coef": 0.1}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"algorithm": {"group_size": 1}}, "algorithm.group_size"),
        (
            {"algorithm": {"group_size": 1, "advantage": "gae", "dynamic_sampling": True}},
            "algorithm.dynamic_sampling",
        ),
        ({"algorithm": NORM}, "algorithm.loss_horizon"),
        ({"algorithm": {**KL, "kl_type": "k1"}}, "algorithm.kl_type"),
        ({"algorithm": {**KL, "kl_type": "k3+", "kl_in": "reward"}}, "algorithm.kl_type"),
        ({"algorithm": {**KL, "kl_in": "reward", "kl_weighted": True}}, "algorithm.kl_weighted"),
        ({"correction": {"weight": "token"}}, "correction.weight"),
        (
            {"algorithm": {"proximal": "current"}, "correction": {"weight": "token", "floor": 3.0}},
            "correction.floor",
        ),
        ({"correction": {"reject": "token", "reject_low": 2.0, "reject_high": 3.0}}, "correction.reject_low"),
        ({"correction": {"reject": "geometric", "reject_high": 0.9}}, "correction.reject_low"),
        ({"reward": {"overlong_buffer": 10}}, "reward.overlong_buffer"),
    ],
)
def test_mathematics_that_cannot_work_is_refused_with_its_key(sections, key):
    assert found("error", **sections) == [key]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algorithm": {"advantage": "gae", "group_size": 1}},
        {"algorithm": {**NORM, "loss_horizon": 5}},
        {"algorithm": {**KL, "kl_type": "k1", "kl_in": "reward"}},
        {"algorithm": {"proximal": "current"}, "correction": {"weight": "token", "floor": 0.5, "cap": 5.0}},
        {"algorithm": {"loss": "reinforce"}, "correction": {"weight": "sequence"}},
        {"correction": {"reject": "kpop"}},
    ],
)
def test_mathematics_that_works_has_no_error(sections):
    assert found("error", **sections) == []


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"algorithm": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}}, "algorithm.aggregation"),
        ({"algorithm": {"loss": "gspo", "aggregation": "seq-mean-token-mean"}}, "algorithm.clip_high"),
        ({"algorithm": {"clip_low": 0.3, "clip_high": 0.2}}, "algorithm.clip_high"),
        ({"algorithm": {"loss": "reinforce"}}, "algorithm.loss"),
        ({"algorithm": {"advantage": "reinforce_pp_baseline"}}, "algorithm.advantage"),
        ({"algorithm": {"aggregation": "token-sum"}}, "algorithm.aggregation"),
    ],
)
def test_settings_that_surprise_are_warned_of(sections, key):
    assert found("warning", **sections) == [key]
