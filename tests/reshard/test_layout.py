"""Rules of layouts by themselves: what no rank holds, and what is no weight of the model, is found."""

import pytest

from mindspeed_asyncflow.config.model import FullTensor
from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment

TENSORS = {"a": FullTensor("a", (6, 4), 0), "b": FullTensor("b", (5,), 1)}
LEFT, RIGHT, B = ("a", Box(0, 6, 0, 2)), ("a", Box(0, 6, 2, 4)), ("b", Box(0, 5, 0, 1))


def layout(*ranks):
    """Rank r holds the (name, box) pairs `ranks[r]`, each in a parameter of its own."""
    params = [
        tuple(LocalParam(name, (box.rows, box.cols), (Segment(name, box),)) for name, box in pairs) for pairs in ranks
    ]
    return Layout(TENSORS, tuple(params), "of a test")


@pytest.mark.parametrize(
    "ranks",
    [([LEFT, RIGHT, B],), ([LEFT], [B, RIGHT]), ([LEFT, B], [LEFT, RIGHT, B]), ([("a", Box(0, 6, 0, 3)), B], [RIGHT])],
)
def test_ranks_that_together_hold_everything_cover_the_model(ranks):
    layout(*ranks).check_coverage()


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (([LEFT, B], [("a", Box(0, 5, 2, 4))]), "1 tensors are not covered; first 'a', rows 5 to 6, columns 2 to 4"),
        (([LEFT, B], [("a", Box(0, 6, 3, 4))]), "first 'a', rows 0 to 6, columns 2 to 3 lie on no rank"),
        (([LEFT, RIGHT], [LEFT]), "first 'b', rows 0 to 5, columns 0 to 1 lie on no rank"),
        (([LEFT], [("b", Box(1, 5, 0, 1))]), "2 tensors are not covered"),
        (([], []), "2 tensors are not covered"),
        (([LEFT, RIGHT, B], [("c", Box(0, 1, 0, 1))]), "'c' is not a weight of the model"),
    ],
)
def test_what_no_rank_holds_and_what_is_no_weight_is_named(ranks, says):
    with pytest.raises(WeightSyncError, match=f"layout of a test: .*{says}"):
        layout(*ranks).check_coverage()
