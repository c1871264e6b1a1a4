"""Rules of the relay's table: every element has one place and one writer, and row shards make one matrix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box, whole
from mindspeed_asyncflow.reshard.relay_table import ALIGN_BYTES, make_table, table_from_text


@st.composite
def cut_models(draw):  # type: ignore[no-untyped-def]
    """Shapes, and boxes of a grid of cuts dealt out to ranks."""
    shapes, writers = {}, {rank: [] for rank in range(4)}
    for index in range(draw(st.integers(1, 4))):
        name = f"t{index}"
        shapes[name] = draw(st.sampled_from([(), (5,), (6, 4), (3, 2, 5), (1, 7)]))
        full = whole(shapes[name])
        rows = sorted(draw(st.sets(st.integers(0, full.r1), max_size=3)) | {0, full.r1})
        cols = sorted(draw(st.sets(st.integers(0, full.c1), max_size=2)) | {0, full.c1})
        for r0, r1 in itertools.pairwise(rows):
            for c0, c1 in itertools.pairwise(cols):
                writers[draw(st.integers(0, 3))].append((name, Box(r0, r1, c0, c1)))
    return shapes, writers, draw(st.sampled_from(["float32", "bfloat16"]))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cut_models())
def test_every_element_of_every_tensor_has_exactly_one_place(model) -> None:  # type: ignore[no-untyped-def]
    shapes, writers, dtype = model
    table = make_table(shapes, dtype, writers)
    item = {"float32": 4, "bfloat16": 2}[dtype]
    used = np.zeros(table.slot_bytes, np.int64)
    for param in table.params:
        full = whole(param.shape)
        places = np.full((full.rows, full.cols), -1)
        for shard in param.shards:
            box = Box(*shard.box)
            assert shard.nbytes == box.size * item and (param.name, box) in writers[shard.writer]
            used[shard.offset : shard.offset + shard.nbytes] += 1
            inner = np.arange(box.size).reshape(box.rows, box.cols) * item
            places[box.r0 : box.r1, box.c0 : box.c1] = shard.offset + inner
        assert param.shards[0].offset % ALIGN_BYTES == 0
        assert len(np.unique(places)) == full.size and places.min() >= 0
        if all(Box(*shard.box).cols == full.cols for shard in param.shards):
            assert (np.diff(places.reshape(-1)) == item).all(), "row shards must make one contiguous matrix"
    assert used.max() == 1
    assert table.slot_bytes == sum(-(-whole(s).size * item // ALIGN_BYTES) * ALIGN_BYTES for s in shapes.values())
    again = table_from_text(table.text)
    assert (again.params, again.digest, again.slot_bytes) == (table.params, table.digest, table.slot_bytes)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box(0, 4, 0, 4), Box(3, 6, 0, 4)], "overlap"),
        ([Box(0, 6, 0, 3), Box(0, 6, 2, 4)], "overlap"),
        ([Box(0, 5, 0, 4)], "not covered"),
        ([Box(0, 6, 0, 4), Box(6, 7, 0, 4)], "outside"),
        ([], "not covered"),
    ],
)
def test_shards_that_are_no_tiling_are_refused(boxes: list[Box], message: str) -> None:
    with pytest.raises(WeightSyncError, match=f"'w'.* {message}"):
        make_table({"w": (6, 4)}, "float32", {0: [("w", box) for box in boxes]})


def test_what_is_no_weight_of_the_model_is_named() -> None:
    with pytest.raises(WeightSyncError, match="rank 3 writes 'other'"):
        make_table({"w": (2, 2)}, "float32", {3: [("other", Box(0, 2, 0, 2))]})
    with pytest.raises(WeightSyncError, match="'w' is int64"):
        make_table({"w": (2, 2)}, "int64")
    with pytest.raises(WeightSyncError, match=r"holds no tensors \['x'\]"):
        make_table({"w": (2, 2)}, "float32").shards_of(["w", "x"])


@pytest.mark.slow
def test_the_table_of_a_model_with_45_thousand_tensors_is_made_and_read_in_time() -> None:
    shapes = {f"model.layers.{i // 768}.mlp.experts.{i % 768}.up_proj.weight": (4, 4) for i in range(45_000)}
    table = make_table(shapes, "bfloat16")
    assert len(table_from_text(table.text).params) == 45_000
    assert len(table.text) < 45_000 * 100
