import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape, subtract, whole

EDGE = st.integers(0, 12)


@st.composite
def boxes(draw):
    r0, c0 = draw(EDGE), draw(EDGE)
    return Box(r0, r0 + draw(st.integers(1, 6)), c0, c0 + draw(st.integers(1, 6)))


def paint(*found: Box) -> np.ndarray:
    """How many of the boxes cover each cell."""
    canvas = np.zeros((20, 20), int)
    for box in found:
        canvas[box.r0 : box.r1, box.c0 : box.c1] += 1
    return canvas


@given(boxes(), boxes())
def test_what_two_boxes_share_and_what_is_left_make_up_the_first(a, b):
    common = a.meet(b)
    left = subtract(a, b)
    assert np.array_equal(paint(*left, *([common] if common else [])), paint(a))
    assert (common is None) == (not (paint(a) & paint(b)).any())


@given(boxes(), EDGE, EDGE)
def test_a_moved_box_keeps_its_size(box, rows, cols):
    moved = box.moved(rows, cols)
    assert (moved.rows, moved.cols, moved.size) == (box.rows, box.cols, box.rows * box.cols)


def test_a_vector_is_a_matrix_of_one_column():
    assert matrix_shape((7,)) == (7, 1)
    assert whole((7,)) == Box(0, 7, 0, 1)
    assert whole((3, 5)) == Box(0, 3, 0, 5)
