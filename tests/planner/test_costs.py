"""Costs follow the roofline and the pipeline, and survive a file."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.costs import SIDES, Costs
from tests.planner.models import PLAIN


def test_few_answers_wait_for_weights_and_many_for_arithmetic():
    assert PLAIN.decode_s(1.0, 0.0) == pytest.approx(PLAIN.decode_s(100.0, 0.0))
    assert PLAIN.decode_s(400.0, 0.0) == pytest.approx(2 * PLAIN.decode_s(200.0, 0.0))


def test_more_answers_read_more_experts_but_never_more_than_all():
    moe = Costs(**PLAIN.to_dict() | {"decode_experts_s": 0.1, "expert_share": 0.25, "decode_answer_s": 0.0})
    one, many = moe.decode_s(1.0, 0.0), moe.decode_s(1000.0, 0.0)
    assert one == pytest.approx(0.01 + 0.1 * 0.25)
    assert many == pytest.approx(0.01 + 0.1)


def test_a_pipeline_idles_for_its_bubble_once_per_chunk():
    piped = Costs(**PLAIN.to_dict() | {"bubble": 3.0})
    flat = PLAIN.train_s(1000.0, 0.0, 6.0)
    assert piped.train_s(1000.0, 0.0, 6.0) == pytest.approx(flat * (6 + 3) / 6)
    assert 2 * piped.train_s(500.0, 0.0, 3.0) > piped.train_s(1000.0, 0.0, 6.0)


def test_arrays_give_what_numbers_give():
    running, context = np.array([1.0, 50.0, 500.0]), np.array([10.0, 1e4, 1e6])
    assert PLAIN.decode_s(running, context) == pytest.approx([PLAIN.decode_s(r, c) for r, c in zip(running, context)])


def test_scaling_a_side_changes_all_of_its_times_and_no_other():
    full = Costs(**{name: 1.0 for name in PLAIN.to_dict()})
    scaled = full.scaled(rollout=2.0, train=3.0, transfer=5.0).to_dict()
    factors = {"rollout": 2.0, "train": 3.0, "transfer": 5.0}
    for side, names in SIDES.items():
        assert {scaled.pop(name) for name in names} == {factors[side]}
    assert set(scaled) == {"expert_share", "bubble", "score_row_s", "score_call_s", "claim_s"}
    assert set(scaled.values()) == {1.0}


def test_costs_come_back_from_plain_values():
    assert Costs.of(PLAIN.to_dict()) == PLAIN


@pytest.mark.parametrize(
    ("change", "said"),
    [({"decode_s": 1.0}, "decode_s unknown"), ({"load_s": -1.0}, "load_s=-1.0"), ({"load_s": "fast"}, "load_s='fast'")],
)
def test_wrong_values_are_named(change, said):
    with pytest.raises(ConfigError, match=said):
        Costs.of(PLAIN.to_dict() | change)


def test_missing_values_are_named():
    with pytest.raises(ConfigError, match="train_token_s missing"):
        Costs.of({"prefill_token_s": 1, "decode_weights_s": 1, "decode_context_s": 1})
