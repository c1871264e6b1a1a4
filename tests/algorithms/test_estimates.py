from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_asyncflow.algorithms.estimates import maj_at_k, mean_at_k, pass_at_k


@given(rows=st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=1, max_size=4), k=st.integers(1, 5))
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_that_hold_a_right_one(rows, k):
    expected = np.mean([np.mean([max(chosen) for chosen in combinations(row, k)]) for row in rows])
    assert pass_at_k(np.array(rows), k) == pytest.approx(expected)


def test_pass_at_more_answers_than_there_are_is_refused():
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(np.ones((1, 2)), 3)


def test_the_mean_leaves_out_what_has_no_score_and_counts_every_row_once():
    """B82: scores 1, 0, 0, 0, 0 are 0.2"""
    assert mean_at_k(np.array([[1.0], [0], [0], [0], [0]])) == 0.2
    assert mean_at_k(np.array([[1.0, np.nan], [0, 0]])) == pytest.approx(1 / 3)
    assert np.isnan(mean_at_k(np.full((2, 2), np.nan)))
    assert pass_at_k(np.array([[np.nan, 1.0], [np.nan, 0.0]]), 2) == 0.5


def test_the_majority_answer_counts_and_of_equals_the_first():
    scores = np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 0.5]])
    assert maj_at_k(scores, [["a", "b", "b"], ["x", "y", "z"]]) == 0.5
