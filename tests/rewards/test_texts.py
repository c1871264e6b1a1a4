import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.texts import Choice, Exact, Format, Length, Number, last_number


def answer(text, truth="", finished=True, tokens=0):
    return Answer(text, truth, finished, tokens=tokens)


@given(st.text())
def test_exact_is_equality_without_surrounding_space(text):
    assert Exact().score(answer(f" {text}\n", text)) == 1.0
    assert Exact().score(answer(text + "x", text)) == 0.0
    assert Exact().score(answer(text, text, finished=False)) == 0.0


def test_exact_may_ignore_case():
    assert Exact(ignore_case=True).score(answer("YES", "yes")) == 1.0 and Exact().score(answer("YES", "yes")) == 0.0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        ("  <think></think><answer>x</answer>  ", 1.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("<think>a</think>so<answer>4</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<think>a</think><answer>4", 0.0),
    ],
)
def test_format_wants_each_tag_once_in_order(text, right):
    assert Format().score(answer(text)) == right


def test_format_takes_a_pattern_and_refuses_a_broken_one():
    assert Format(pattern=r"\d+").score(answer(" 123 ")) == 1.0 and Format(pattern=r"\d+").score(answer("1a")) == 0.0
    with pytest.raises(ValueError, match="no regular expression"):
        Format(pattern="(")
    with pytest.raises(ValueError, match="list of names"):
        Format(tags="think")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 + 5 = 12.", "12"),
        ("#### 1,234,567", "1234567"),
        ("-3.5", "-3.5"),
        ("x = .5", "0.5"),
        ("about 2e-3 m", "0.002"),
        ("40%", "40"),
        ("from 3 to 12,5", "5"),
        ("x = \u22121", "-1"),
        ("pages 3-5", "5"),
        ("(-5)", "-5"),
        ("none", None),
        ("", None),
        ("...,,,%%%", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    found = last_number(text)
    assert found is None if number is None else found == type(found)(number)


@given(st.text(alphabet="0123456789.,-+eE% x", max_size=60))
def test_any_text_has_a_number_or_none_and_never_an_error(text):
    last_number(text)


@given(st.integers(-(10**40), 10**40))
def test_huge_numbers_are_compared_exactly(number):
    assert Number().score(answer(f"so {number}", str(number))) == 1.0
    assert Number().score(answer(f"so {number + 1}", str(number))) == 0.0


def test_a_number_beyond_all_measure_is_wrong_not_an_error():
    assert Number().score(answer("1e9999999", "4")) == 0.0
    assert Number(tolerance=0.1, relative=True).score(answer("4", "1e9999999")) in (0.0, 1.0)
    assert Number().score(answer("1e9999999", "1e9999999")) == 1.0


@pytest.mark.parametrize(
    ("options", "said", "right"),
    [({}, "0.1", 0.0), ({"tolerance": 0.1}, "0.1", 1.0), ({"tolerance": 0.1, "relative": True}, "0.1", 0.0)],
)
def test_number_has_a_tolerance(options, said, right):
    assert Number(**options).score(answer(said, "0.2")) == right


def test_a_truth_without_a_number_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="holds no number"):
        Number().score(answer("4", "four"))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is B.", "B"),
        ("Answer: (c)", "C"),
        ("I think (A), no, (D)", "D"),
        ("\\boxed{B} although (A)", "B"),
        ("\\boxed{\\text{(C)}}", "C"),
        ("b", "B"),
        (" D. ", "D"),
        ("A cat sat on the mat", None),
        ("The answer is a matter of taste: (B)", "B"),
        ("the answer is b", "B"),
        ("the answer is Brazil", None),
    ],
)
def test_the_chosen_letter(text, letter):
    assert Choice().chosen(text) == letter


def test_choice_compares_letters_and_names_a_truth_without_one():
    assert Choice().score(answer("The answer is (B)", "B")) == 1.0 and Choice().score(answer("(A)", "B")) == 0.0
    with pytest.raises(ValueError, match="names no letter"):
        Choice().score(answer("(A)", "seven"))
    with pytest.raises(ValueError, match="different"):
        Choice(letters="AAB")


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_length_punishment_falls_from_0_to_minus_1(shape):
    scorer = Length(limit=20, free=10, shape=shape)
    values = [scorer.score(answer("", finished=False, tokens=n)) for n in (0, 10, 15, 20, 99)]
    assert values == pytest.approx([0, 0, -0.5, -1, -1])


@pytest.mark.parametrize("options", [{"limit": 5, "free": 5}, {"limit": 5, "shape": "square"}])
def test_length_refuses_what_makes_no_sense(options):
    with pytest.raises(ValueError, match=r"free|shape"):
        Length(**options)
