"""Arrays in messages."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as arrays

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.service.plain import put_together, taken_apart

KINDS = (
    arrays.scalar_dtypes().filter(lambda kind: kind.kind in "biuf" and kind.itemsize <= 8)
    | arrays.unicode_string_dtypes()
)


@given(array=arrays.arrays(KINDS, arrays.array_shapes(min_dims=0, min_side=0)))
def test_an_array_comes_back_bit_for_bit_through_types_of_the_language_only(array):
    parts = taken_apart(array)
    message = pickle.dumps(parts)
    assert b"numpy" not in message
    back = put_together(pickle.loads(message))
    assert back.shape == array.shape and back.dtype == array.dtype and back.tobytes() == array.tobytes()


@pytest.mark.parametrize("array", [np.array([None, {}]), np.zeros(2, [("a", "i4"), ("b", "f4")])])
def test_what_has_no_layout_that_others_know_is_refused(array):
    with pytest.raises(TypeError, match="was to cross"):
        taken_apart(array)


def test_an_array_that_is_not_contiguous_crosses_in_the_order_of_its_indices():
    array = np.arange(12).reshape(3, 4).T
    assert (put_together(taken_apart(array)) == array).all()


def test_settings_cross_as_text():
    config = parse_config("", ["trainer.betas=[0.8, 0.9]", "trainer.lr=3e-4", "placement.trainer_env={A: b}"])
    message = pickle.dumps(config)
    assert b"pydantic" not in message and pickle.loads(message) == config
