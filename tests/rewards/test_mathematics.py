import asyncio
import threading

import pytest

from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.mathematics import Math

pytest.importorskip("math_verify", reason="needs math-verify")
pytestmark = pytest.mark.slow  # the library takes seconds to import


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("So it is $\\boxed{\\frac{1}{3}}$", "1/3", 1.0),
        ("So it is $\\boxed{\\frac{2}{6}}$", "\\frac{1}{3}", 1.0),
        ("$\\boxed{0.5}$", "$\\frac12$", 1.0),
        ("$\\boxed{4}$", "5", 0.0),
        ("I do not know", "5", 0.0),
        ("$\\boxed{x^2+2x+1}$", "$(x+1)^2$", 1.0),
        ("$\\boxed{2\\pi}$", "2\\pi", 1.0),
        ("$\\boxed{2}$", "2\\pi", 0.0),
        ("$\\boxed{\\sqrt{18}}$", "3\\sqrt{2}", 1.0),
        ("$\\boxed{10}$", "10^{5}", 0.0),
        ("$\\boxed{18}$", "#### 18", 1.0),
    ],
)
def test_equal_in_mathematics_not_in_text(text, truth, right):
    assert Math().score(Answer(text, truth, True)) == right


def test_a_truth_that_is_no_mathematics_is_an_error_and_an_unfinished_answer_no_success():
    with pytest.raises(ValueError, match="no mathematical expression"):
        Math().score(Answer("$\\boxed{4}$", "", True))
    assert Math().score(Answer("$\\boxed{4}$", "4", False)) == 0.0


def test_the_same_in_every_kind_of_thread():
    """B35: 1/3 against 1/3 in the main thread, a worker thread and an asyncio executor"""
    scorer, given, found = Math(), Answer("$\\boxed{\\frac13}$", "\\frac{1}{3}", True), []
    found.append(scorer.score(given))
    thread = threading.Thread(target=lambda: found.append(scorer.score(given)))
    thread.start()
    thread.join(60)

    async def in_executor():
        return await asyncio.get_running_loop().run_in_executor(None, scorer.score, given)

    found.append(asyncio.run(in_executor()))
    assert found == [1.0, 1.0, 1.0]
