"""Lengths are what the settings say, cut where a run cuts them."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.workload import Lengths, Workload


@pytest.mark.parametrize(("mean", "p95"), [(100, 100), (1000, 1500), (1000, 3000), (1000, 3800)])
def test_a_lognormal_has_its_mean_and_quantile(mean, p95):
    lengths = Lengths.lognormal(mean, p95, 10**7)
    assert lengths.mean == pytest.approx(mean, rel=0.06)  # 256 points leave out the far tail
    assert lengths.quantile(0.95) == pytest.approx(p95, rel=0.03)


@pytest.mark.parametrize("p95", [99, 390])
def test_a_quantile_that_no_lognormal_has_is_refused(p95):
    with pytest.raises(ConfigError, match="a mean of 100 needs a 95 % quantile of 100 to 387"):
        Lengths.lognormal(100, p95, 1000)


def test_longer_answers_end_at_the_longest():
    lengths = Lengths.of_bins([(10, 1), (500, 2), (900, 1)], 400)
    assert lengths.tokens.tolist() == [10, 400]
    assert lengths.share.tolist() == [0.25, 0.75]


@pytest.mark.parametrize("bins", [[], [(0, 1)], [(5, -1)], [(5, 0)]])
def test_bins_without_weight_are_refused(bins):
    with pytest.raises(ConfigError, match="with some weight above 0"):
        Lengths.of_bins(bins, 10)


def test_samples_and_the_expected_longest_follow_the_shares():
    lengths = Lengths.of_bins([(10, 3), (20, 1)], 100)
    drawn = lengths.sample(np.random.default_rng(0), 20000)
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.02)
    assert lengths.longest_of(1) == pytest.approx(lengths.mean)
    assert lengths.longest_of(4) == pytest.approx(20 - 10 * 0.75**4)


def test_the_workload_of_a_configuration_uses_its_limits():
    config = parse_config(
        "data: {max_prompt_tokens: 50}\nrollout: {max_new_tokens: 300}\n"
        "workload: {prompt_bins: [[40, 1], [60, 1]], answer_mean: 200, answer_p95: 500}\n"
        "workflow: {groups_per_step: 4}\nalgorithm: {group_size: 3}"
    )
    workload = Workload.of(config)
    assert workload.prompt.tokens.tolist() == [40, 50]
    assert workload.answer.longest == 300
    assert workload.samples == 12
    assert workload.step_tokens == pytest.approx(12 * (45 + workload.answer.mean))
