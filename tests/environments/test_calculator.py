"""The calculator's language: exact, bounded, and nothing but arithmetic."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.environments.base import MODEL, REPLY, Turn
from mindspeed_asyncflow.environments.calculator import LONGEST, BadExpression, Calculator, evaluate, shown
from mindspeed_asyncflow.errors import RewardError

NUMBERS = st.integers(0, 999).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"{t[0]} {t[1]} {t[2]}"),
        inner.map(lambda e: f"({e})"),
        inner.map(lambda e: f"-({e})"),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
@settings(max_examples=60, deadline=None)
def test_whole_numbers_come_out_as_in_python(expression):
    assert evaluate(expression) == eval(expression)


@given(st.text(alphabet="0123456789.+-*/() \n_x", max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_gives_a_number_or_says_why_not(text):
    try:
        assert isinstance(evaluate(text), Fraction)
    except BadExpression as error:
        assert str(error)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1/3+1/6", "0.5"), ("2-3-4", "-5"), ("8/4/2", "1"), ("2*(3+4)*5", "70"), ("--2", "2"), (".5+1.", "1.5"),
     ("1/3", "0.333333333333"), ("-1/8", "-0.125"), ("1/1000000000000000", "0")],
)  # fmt: skip
def test_left_to_right_products_first_and_without_rounding_on_the_way(expression, value):
    assert shown(evaluate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [("", "ends too early"), ("1+", "ends too early"), ("(1", "not closed"), ("1)", "unexpected )"),
     ("1/0", "division by zero"), ("2**9", "unexpected *"), ("__import__", "unexpected _"), ("1 2", "unexpected 2"),
     ("9" * 40, "too large"), ("*".join(["99999999"] * 20), "too large"), ("1" * (LONGEST + 1), "more than"),
     ("(" * 150 + "1", "not closed"), ("٣", "unexpected")],
)  # fmt: skip
def test_what_cannot_be_calculated_is_named(expression, why):
    with pytest.raises(BadExpression, match=why.replace(")", r"\)").replace("*", r"\*")):
        evaluate(expression)


def test_the_last_complete_call_of_the_last_turn_counts():
    calculator = Calculator()
    turns = [
        Turn(MODEL, "<calc>1</calc>"),
        Turn(REPLY, "1"),
        Turn(MODEL, "<calc>2</calc> or <calc>12*3</calc> <calc>4"),
    ]
    assert calculator.reply(turns, "", {}) == "36"
    assert calculator.reply([Turn(MODEL, "36 it is")], "", {}) is None
    assert calculator.reply([Turn(MODEL, "</calc><calc>")], "", {}) is None
    assert calculator.reply([Turn(MODEL, "<calc>1/0</calc>")], "", {}) == "error: division by zero"


def test_markers_can_be_left_out_and_a_failure_can_have_a_word():
    whole = Calculator(open="", close="", wrong="?")
    assert whole.reply([Turn(MODEL, "1+2")], "", {}) == "3"
    assert whole.reply([Turn(MODEL, "1+")], "", {}) == "?"
    assert Calculator(open="=", close="").reply([Turn(MODEL, "3=1=4+1")], "", {}) == "5"
    with pytest.raises(RewardError, match="make them differ"):
        Calculator(open="|", close="|")
