import numpy as np
import pytest

from mindspeed_asyncflow.algorithms.aggregate import loss_denominator, token_weights
from mindspeed_asyncflow.errors import ConfigError
from tests.algorithms.cases import LENGTHS, micro_batch

LOSSES = np.array([-1.105171, -0.818731, 1.349859, 1.0, 0.8, 1.051271])  # F6


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", 0.379538),
        ("seq-mean-token-sum", 1.138614),
        ("seq-mean-token-mean", 0.044166),
        ("seq-mean-token-sum-norm", 0.284654),
        ("token-sum", 2.277228),
    ],
)
def test_golden_values_of_the_aggregations(mode, expected):
    """F8; and the weighted sums of the two answers apart add up to the same."""
    for parts in ([[0, 1]], [[0], [1]], [[1, 0]]):
        total = 0.0
        for part in parts:
            batch = micro_batch(LENGTHS, [1, -1], np.zeros(6), order=part)
            losses = np.concatenate([LOSSES[:2] if i == 0 else LOSSES[2:] for i in part])
            weights = token_weights(batch, mode)
            assert weights.dtype == np.float32 and (weights[batch.loss_mask == 0] == 0).all()
            total += (weights[batch.loss_mask > 0] * losses).sum()
        assert total / loss_denominator(mode, tokens=6, sequences=2, horizon=4) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_nothing_trained_gives_zero_not_nan(mode):
    """B09"""
    batch = micro_batch([4, 12], [1, 1], np.zeros(16), masks=np.zeros(16))
    weights = token_weights(batch, mode)
    assert np.isfinite(weights).all() and weights.sum() == 0
    assert loss_denominator(mode, tokens=0, sequences=0) == 1.0


def test_an_unknown_aggregation_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="seq-mean-token-mean"):
        loss_denominator("mean", 1, 1)
