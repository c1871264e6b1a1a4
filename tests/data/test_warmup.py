import random

import pytest

from mindspeed_asyncflow.data.char_tokenizer import make_char_tokenizer
from mindspeed_asyncflow.data.sorting import SortDigits, SortLong
from mindspeed_asyncflow.data.warmup import WarmUp, _batches


def test_the_rate_rises_holds_and_falls():
    recipe = WarmUp(steps=100, lr=1.0, ramp=10, decay_share=0.4)
    assert [recipe.rate(step) for step in (0, 9, 50, 60)] == pytest.approx([0.1, 1, 1, 1])
    assert [recipe.rate(step) for step in (80, 99)] == pytest.approx([0.5, 0.025])


def test_only_the_answer_and_its_end_carry_loss():
    """B28: the EOS is learnt, although it is one of the special ids."""
    tokenizer, task = make_char_tokenizer(), SortDigits()
    problems = task.problems(20, seed=0)
    ((input_ids, labels),) = _batches(tokenizer, task, problems, WarmUp(batch=16), random.Random(0))
    assert input_ids.shape == (16, 10)  # 4 digits, ">", 4 digits, EOS
    assert (labels[:, :5] == -100).all() and (labels[:, 5:] == input_ids[:, 5:]).all()
    assert (input_ids[:, -1] == tokenizer.eos_token_id).all()
    asked = {problem.text for problem in problems}
    assert all(tokenizer.decode(row[:5]) in asked for row in input_ids)


def test_answers_of_like_length_share_a_batch():
    """B27: padding is told by length, not by token; it never carries loss."""
    tokenizer, task = make_char_tokenizer(), SortLong(max_digits=60)
    recipe = WarmUp(batch=8, length_pool=6)
    batches = _batches(tokenizer, task, task.problems(100, seed=0), recipe, random.Random(0))
    padding = sum(int((ids == tokenizer.pad_token_id).sum()) for ids, _ in batches)
    assert len(batches) == 6 and padding < 0.3 * sum(ids.numel() for ids, _ in batches)
    assert all((labels[ids == tokenizer.pad_token_id] == -100).all() for ids, labels in batches)
