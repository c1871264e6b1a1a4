import random
import statistics

import pytest

from mindspeed_asyncflow.data.sorting import SortDigits, SortFive, SortLong
from mindspeed_asyncflow.errors import DataError


def test_sort4_asks_each_of_its_ten_thousand_prompts_once():
    problems = SortDigits().problems(10000, seed=0)
    assert len({problem.text for problem in problems}) == 10000
    assert all(problem.truth == "".join(sorted(problem.text[:4])) and problem.text[4:] == ">" for problem in problems)
    with pytest.raises(DataError, match="10000 prompts"):
        SortDigits().problems(10001, seed=0)


def test_sort5_is_the_same_with_five_digits():
    problems = SortFive().problems(500, seed=0)
    assert len({problem.text for problem in problems}) == 500
    assert all(len(problem.text) == 6 and problem.truth == "".join(sorted(problem.text[:5])) for problem in problems)


def test_the_seed_alone_decides_which_problems_are_made():
    for task in (SortDigits(), SortLong()):
        assert task.problems(50, seed=1) == task.problems(50, seed=1) != task.problems(50, seed=2)


@pytest.mark.parametrize(
    "text, finished, score", [("0237", True, 1.0), ("0237", False, 0.0), ("0273", True, 0.0), ("02377", True, 0.0)]
)
def test_sort4_counts_only_exact_answers_that_the_policy_ended(text, finished, score):
    assert SortDigits().score(text, "0237", finished) == score


def test_one_demonstration_in_four_is_drawn_right_and_the_others_are_fluent():
    task, rng = SortDigits(), random.Random(0)
    problem = task.problems(1, seed=5)[0]
    assert len(set(problem.text)) == 5
    shown = [task.demonstrate(problem, rng) for _ in range(4000)]
    share = statistics.mean(answer == problem.truth for answer in shown)
    assert 0.2 < share < 0.6  # a copied or reversed prompt may happen to be sorted
    assert all(sorted(answer) == sorted(problem.truth) for answer in shown)


def test_sort_long_has_a_long_tail_of_lengths_within_its_bounds():
    lengths = [len(problem.truth) for problem in SortLong().problems(4000, seed=0)]
    assert min(lengths) == 4 and 240 <= max(lengths) <= 250
    assert statistics.median(lengths) < 40 and statistics.quantiles(lengths, n=10)[-1] > 140
    assert {len(p.truth) for p in SortLong(min_digits=3, max_digits=3).problems(20, seed=0)} == {3}


@pytest.mark.parametrize(
    "text, finished, score",
    [("1123", True, 1.0), ("1132", True, 0.5), ("11", True, 0.5), ("1123", False, 0.0), ("", True, 0)],
)
def test_sort_long_rewards_the_share_of_right_positions(text, finished, score):
    assert SortLong().score(text, "1123", finished) == score


def test_sort_long_refuses_impossible_bounds():
    with pytest.raises(DataError, match="min_digits"):
        SortLong(min_digits=9, max_digits=4)
