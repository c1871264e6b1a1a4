import numpy as np
import pytest

from mindspeed_asyncflow.algorithms.overlong import overlong_penalty


@pytest.mark.parametrize(("beyond", "last"), [("capped", -1.0), ("falling", -1.05)])
def test_golden_values_of_both_published_forms(beyond, last):
    """F15: limit 100, buffer 20"""
    found = overlong_penalty(np.array([80, 90, 100, 101]), 100, 20, 1.0, beyond)
    np.testing.assert_allclose(found, [0, -0.5, -1, last], atol=1e-12)


def test_only_the_length_of_the_answer_counts():
    """B21: lengths 70, 80, 81, 90, 100"""
    found = overlong_penalty(np.array([70, 80, 81, 90, 100]), 100, 20, 1.0, "capped")
    np.testing.assert_allclose(found, [0, 0, -0.05, -0.5, -1.0], atol=1e-12)


def test_the_factor_scales_it_and_no_answers_are_no_error():
    np.testing.assert_allclose(overlong_penalty(np.array([90]), 100, 20, 0.4, "capped"), [-0.2])
    assert len(overlong_penalty(np.array([], int), 100, 20, 1.0, "capped")) == 0
