"""Profiles survive their file, hold at other sizes, and make overlapping schedules pay for shared cores."""

from __future__ import annotations

import json

import pytest

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.fit import Point
from mindspeed_asyncflow.planner.profile import Profile
from tests.planner.models import SMALL, configuration, work


def profile(**slower: float) -> Profile:
    return Profile(
        config=configuration().model_dump(mode="json"),
        alone=Costs(
            prefill_token_s=1e-5,
            decode_weights_s=1e-2,
            decode_context_s=1e-8,
            train_token_s=1e-4,
            train_micro_s=0.01,
            load_s=0.2,
        ),
        slower={"rollout": 1.0, "train": 1.0} | slower,
        errors={"generate": 0.1},
        points=[Point("train", {"tokens": 3.0}, 0.5)],
        prompt_bins=[(5, 1.0)],
        answer_bins=[(7, 2.0)],
    )


def test_a_profile_comes_back_from_its_file(tmp_path):
    profile().save(tmp_path / "p.json")
    back = Profile.load(tmp_path / "p.json")
    assert back.alone == profile().alone and back.points == profile().points
    assert [tuple(b) for b in back.answer_bins] == [(7, 2.0)]
    assert back.costs(configuration(), work(SMALL)) == profile().costs(configuration(), work(SMALL))


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "no profile of format"), ("{", "cannot be read"), ('{"format": 1}', "incomplete profile")],
)
def test_other_files_are_refused(tmp_path, text, said):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Profile.load(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="no such profile"):
        Profile.load(tmp_path / "none.json")


def test_wrong_costs_in_a_file_are_named(tmp_path):
    profile().save(tmp_path / "p.json")
    values = json.loads((tmp_path / "p.json").read_text())
    values["alone"]["load_s"] = "long"
    (tmp_path / "p.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="load_s='long'"):
        Profile.load(tmp_path / "p.json")


def test_measured_costs_hold_where_they_were_measured():
    costs = profile(rollout=1.5).costs(configuration("workflow.max_lag=0", "workflow.overlap=false"), work(SMALL))
    assert costs == profile().alone


def test_larger_replicas_decode_faster_than_measured():
    costs = profile().costs(configuration("rollout.tensor_parallel=2"), work(SMALL))
    assert costs.decode_weights_s == pytest.approx(0.005)


def test_sides_that_are_busy_together_slow_each_other_down():
    config = configuration("workflow.max_lag=1", "workflow.groups_per_step=4")
    costs = profile(rollout=1.5, train=2.0).costs(config, work(SMALL))
    assert 1e-2 < costs.decode_weights_s <= 1.5e-2
    assert 1e-4 < costs.train_token_s <= 2e-4
