"""The judge of reasoning-gym answers."""

import json

import pytest

from mindspeed_asyncflow.environments.base import MODEL, REPLY, Turn, build_environment


@pytest.mark.slow
def test_the_judge_gives_its_hint_until_the_last_turn_is_right():
    pytest.importorskip("reasoning_gym")
    judge = build_environment("reasoning_gym", {"dataset": "chain_sum", "hint": "no", "min_terms": 2, "max_terms": 2})
    truth = judge.gym.problems(1, 0)[0].truth
    right = json.loads(truth)["answer"]
    wrong = [Turn(MODEL, f"{int(right) + 1}")]
    assert judge.reply(wrong, truth, {}) == "no"
    assert judge.reply([*wrong, Turn(REPLY, "no"), Turn(MODEL, f"it is {right}.")], truth, {}) is None
