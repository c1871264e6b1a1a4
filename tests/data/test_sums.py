import random
import statistics

import pytest

from mindspeed_asyncflow.data.builtin_models import alphabet
from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.data.sums import ChainSum, signed_numbers
from mindspeed_asyncflow.errors import DataError


def test_problems_are_bare_one_digit_expressions_with_their_value():
    pytest.importorskip("reasoning_gym", reason="optional extra [tasks]")
    problems = ChainSum(max_terms=4).problems(300, seed=0)
    for problem in problems:
        assert problem.text.endswith("=") and set(problem.text) <= set("0123456789+-=")
        assert sum(signed_numbers(problem.text)) == int(problem.truth) and set(problem.text + problem.truth) <= set(
            "".join(alphabet("tiny_qwen2_sums"))
        )
        assert 2 <= len(signed_numbers(problem.text)) <= 4
    assert problems == ChainSum(max_terms=4).problems(300, seed=0) != ChainSum(max_terms=4).problems(300, seed=1)


@pytest.mark.parametrize("text, numbers", [("3+4-1=", [3, 4, -1]), ("0-8=", [0, -8]), ("12+0=", [12, 0])])
def test_an_expression_is_read_with_its_signs(text, numbers):
    assert signed_numbers(text) == numbers


@pytest.mark.parametrize(
    "text, truth, finished, score",
    [
        ("-12", "-12", True, 1),
        ("-12", "-12", False, 0),
        ("12", "-12", True, 0),
        ("-", "-12", True, 0),
        ("", "0", True, 0),
        ("6=", "6", True, 0),
        ("06", "6", True, 1),
    ],
)
def test_only_the_right_number_counts_and_only_where_the_policy_ended_it(text, truth, finished, score):
    assert ChainSum().score(text, truth, finished) == score


def test_one_demonstration_in_four_is_drawn_right_and_the_others_are_fluent():
    task, rng, problem = ChainSum(), random.Random(0), Problem("9-4-3=", "2")
    shown = [task.demonstrate(problem, rng) for _ in range(4000)]
    assert set(shown) == {"2", "5", "16", "9"}
    assert 0.22 < statistics.mean(answer == "2" for answer in shown) < 0.28


def test_impossible_bounds_are_refused():
    with pytest.raises(DataError, match="min_terms"):
        ChainSum(min_terms=4, max_terms=3)
