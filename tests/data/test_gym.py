import json

import pytest

from mindspeed_asyncflow.data.tasks import build_task
from mindspeed_asyncflow.errors import DataError

pytest.importorskip("reasoning_gym", reason="optional extra [tasks]")


def test_gold_answers_score_one_also_in_tags_and_unfinished_ones_nothing():
    task = build_task("reasoning_gym:gcd", {})
    for problem in task.problems(5, seed=3):
        gold = json.loads(problem.truth)["answer"]
        assert task.score(gold, problem.truth, True) == task.score(f"<answer>{gold}</answer>", problem.truth, True) == 1
        assert task.score(gold, problem.truth, False) == 0
        assert task.score("no idea", problem.truth, True) == 0
    assert task.problems(5, seed=3) == task.problems(5, seed=3) != task.problems(5, seed=4)


@pytest.mark.parametrize(
    "dataset, options", [("no_such_dataset", {}), ("gcd", {"wrong": 1}), ("gcd", {"min_numbers": -3})]
)
def test_a_dataset_that_the_library_refuses_is_a_clear_error(dataset, options):
    with pytest.raises(DataError, match=f"reasoning_gym refuses dataset '{dataset}'"):
        build_task(f"reasoning_gym:{dataset}", options).problems(1, seed=0)
