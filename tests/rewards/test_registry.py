import time

import pytest

from mindspeed_asyncflow.config.intake import DataConfig, RewardConfig, ScorerConfig
from mindspeed_asyncflow.errors import RewardError
from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.combined import Combined, Part, Result
from mindspeed_asyncflow.rewards.pool import Score, ScorerPool
from mindspeed_asyncflow.rewards.registry import SCORERS, Spec, build, build_scorer, check

HERE = "tests.rewards.user_scorers"


def spec(*scorers, task="sort4"):
    scorers = [ScorerConfig(**s) if isinstance(s, dict) else ScorerConfig(name=s) for s in scorers]
    return Spec.of(DataConfig(task=task), RewardConfig(scorers=scorers))


class Says:
    def __init__(self, value):
        self.value = value

    def score(self, answer):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def combined(*values, weights=(0.7, 0.3)):
    parts = [Part(f"s{i}", w, Says(v)) for i, (v, w) in enumerate(zip(values, weights))]
    return Combined(parts).result(Answer("", "", True), {})


def test_without_scorers_the_task_scores():
    result = build(spec()).result(Answer("0237", "0237", True), {})
    assert result == Result(1.0)


def test_the_weighted_sum_names_what_each_scorer_gave():
    assert combined(1.0, 0.5) == Result(pytest.approx(0.85), "", {"s0": 1.0, "s1": 0.5})


def test_one_that_abstains_leaves_the_sum_to_the_others_at_the_same_total_weight():
    """B05: weights .7 and .3, the first abstains"""
    assert combined(None, 0.5).value == pytest.approx(0.5)
    assert combined(None, None) == Result()


def test_a_penalty_stays_a_penalty_where_others_abstain():
    assert combined(None, 1.0, weights=(1.0, -0.5)).value == pytest.approx(-1.5)


def test_a_batch_scorer_that_hangs_costs_its_answers_and_no_more():
    class Hangs:
        def score_batch(self, answers):
            time.sleep(2)

    part = Combined([Part("slow", 1.0, Hangs())], timeout_s=0.2)
    began = time.monotonic()
    known = part.ask_batches([Answer("", "", True)])
    assert time.monotonic() - began < 1.0
    assert "0.18 s" in part.result(Answer("", "", True), {"slow": known["slow"][0]}).error


@pytest.mark.parametrize(
    ("value", "said"), [(ZeroDivisionError("x"), "ZeroDivisionError"), (float("inf"), "inf"), (float("nan"), "nan")]
)
def test_one_that_fails_leaves_the_answer_without_a_score_and_is_named(value, said):
    """B05"""
    result = combined(1.0, value)
    assert result.value is None and result.error.startswith("s1: ") and said in result.error


def test_the_same_scorer_twice_has_two_names():
    found = build(spec({"name": "number", "options": {"tolerance": 1}}, "number"))
    assert [part.name for part in found.parts] == ["number", "number#2"]


def test_the_scorer_of_the_task_can_be_one_of_several():
    found = build(spec("task", {"name": "length", "weight": 0.5, "options": {"limit": 10}}))
    assert found.result(Answer("0237", "0237", True, tokens=5), {}).value == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("exactly", {}, "unknown; there are: task, exact"),
        ("number", {"tolerence": 1}, "tolerence"),
        ("length", {}, "length: option limit is missing"),
        ("http", {"urls": "nowhere"}, "nowhere"),
        ("nowhere_at_all:score", {}, "cannot be loaded"),
        (f"{HERE}:missing", {}, "cannot be loaded"),
        (f"{HERE}:strange", {}, "wants weather"),
        (f"{HERE}:empty", {}, "has no argument"),
        (f"{HERE}:good", {"bonus": 1}, "has no argument bonus"),
        (f"{HERE}:NOT_A_FUNCTION", {}, "no function"),
        (f"{HERE}:later", {}, "async"),
        (f"{HERE}:good", {"answer": 1}, "options answer"),
        (":score", {}, "cannot be loaded"),
        ("http", {"urls": "http://x:99999/"}, "[Pp]ort"),
        ("http", {"urls": "http://x/", "token_file": "nowhere.txt"}, "nowhere.txt"),
    ],
)
def test_a_scorer_that_cannot_be_built_is_refused_with_its_name(name, options, said):
    with pytest.raises(RewardError, match=said) as error:
        build_scorer(name, options, 5.0)
    if ":" in name:
        assert "def score(answer: str, truth: str)" in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "option"),
    [
        ("exact", {"ignore_case": "no"}, "ignore_case"),
        ("number", {"relative": 1}, "relative"),
        ("number", {"tolerance": "0.1"}, "tolerance"),
        ("length", {"limit": 10.5}, "limit"),
        ("code", {"memory_mb": True}, "memory_mb"),
        ("format", {"tags": "think"}, "tags"),
        ("http", {"urls": "http://x/", "batch": None}, "batch"),
    ],
)
def test_an_option_of_another_kind_than_its_scorer_takes_is_refused_with_its_name(name, options, option):
    with pytest.raises(RewardError, match=f"{name}, option {option} = "):
        check(Spec([("sort4", {})], [(name, 1.0, options)]))


def test_options_of_the_kinds_that_scorers_declare_are_taken():
    scorers = [("number", 1.0, {"tolerance": 1}), ("format", 1.0, {"tags": ["a", "b"]}), ("length", -1.0, {"limit": 5})]
    check(Spec([("sort4", {})], scorers))


def test_a_users_function_gets_what_it_names_and_its_options():
    answer = Answer("x", "x", True, "abc", {"id": 1})
    assert build_scorer(f"{HERE}:good", {}, 5.0).score(answer) == 1.0
    assert build_scorer(f"{HERE}:wide", {"bonus": 0.5}, 5.0).score(answer) == 4.5


def test_weights_that_add_up_to_nothing_are_refused():
    with pytest.raises(RewardError, match="are 0"):
        build(spec({"name": "exact", "weight": 0}, {"name": "number", "weight": 0}))


def test_every_documented_scorer_is_there():
    assert set(SCORERS) == {"exact", "format", "number", "choice", "math", "code", "length", "http"}


@pytest.mark.slow
def test_a_weighted_sum_goes_through_the_processes_of_a_pool():
    scorers = [ScorerConfig(name="exact", weight=2), ScorerConfig(name=f"{HERE}:good", weight=1)]
    pool = ScorerPool(DataConfig(), RewardConfig(scorers=scorers))
    try:
        found = pool.score([Answer("a", "a", True), Answer("b ", "b", True)])
        assert found == [
            Score(3.0, "", {"exact": 1.0, f"{HERE}:good": 1.0}),
            Score(2.0, "", {"exact": 1.0, f"{HERE}:good": 0.0}),
        ]
    finally:
        pool.close()
    with pytest.raises(RewardError, match="wants weather"):
        ScorerPool(DataConfig(), RewardConfig(scorers=[ScorerConfig(name=f"{HERE}:strange")]))
