import dataclasses

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.algorithms.value_loss import make_value_loss
from mindspeed_asyncflow.config.schema import CriticConfig
from tests.algorithms.cases import micro_batch, on_tokens


def batch_of(before, returns, masks=None):
    batch = micro_batch([len(before)], [0.0], np.zeros(len(before)), masks=masks)
    spread = [np.concatenate([np.asarray(x, float), [0.0]]) for x in (before, returns)]
    return dataclasses.replace(batch, values=spread[0], returns=spread[1])


def test_the_larger_of_plain_and_clipped_error_counts():
    """By hand: V 1.0, before 0.2, R 0.0, clip 0.5 -> plain 1, clipped 0.49; V 1.0, R 2.0 -> plain 1, clipped 1.69."""
    values, batch = None, batch_of([0.2, 0.2], [0.0, 2.0])
    values = on_tokens(batch, [1.0, 1.0]).requires_grad_()
    loss, parts = make_value_loss(CriticConfig(value_clip=0.5))(values, values, batch)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1 + 1.69))
    assert values.grad[:2].tolist() == [1.0, 0.0]  # a clipped value is not pulled any further
    assert parts["critic/vf_clipfrac_sum"] == 1 and parts["critic/tokens_count"] == 2


def test_without_a_clip_it_is_half_the_squared_error_of_trained_tokens():
    batch = batch_of([0.0, 0.0, 0.0], [1.0, 5.0, 3.0], masks=[1, 0, 1])
    values = torch.full((4,), float("nan"), dtype=torch.float64)
    values[[0, 2]] = 2.0
    loss, parts = make_value_loss(CriticConfig(value_clip=None))(values.requires_grad_(), values, batch)
    assert loss.item() == pytest.approx(0.5 * (1 + 1)) and parts["critic/returns_sum"] == 4


def test_a_batch_without_returns_is_refused():
    batch = micro_batch([2], [0.0], np.zeros(2))
    with pytest.raises(ValueError, match="returns"):
        make_value_loss(CriticConfig())(on_tokens(batch, [0, 0]), None, batch)
