"""Columns, ragged rows, and the schema that keeps them to their declared type."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mindspeed_asyncflow.dock import kinds
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, ColumnSpec, Ragged, Schema, TaskSpec, grpo_tasks
from mindspeed_asyncflow.errors import DockError


def packed(columns, name, values):
    schema = Schema(columns, [])
    return kinds.pack(schema.column(name), schema.parts[name], values)


ROWS = st.lists(arrays(np.int32, st.integers(0, 9)), max_size=8)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_ragged_rows_come_back_equal_in_any_order_and_selection_copies_nothing(rows, rng):
    ragged = Ragged.from_rows(rows, "int32")
    order = [rng.randrange(len(rows)) for _ in range(len(rows) * 2)] if rows else []
    taken = ragged.take(np.array(order, np.int64))
    assert taken.values is ragged.values
    for form in (taken, taken.packed()):
        assert [r.tolist() for r in form] == [rows[i].tolist() for i in order]
        assert [form[i].tolist() for i in range(len(form))] == [rows[i].tolist() for i in order]
    packed = taken.packed()
    assert packed.values.size == packed.offsets[-1] == sum(len(rows[i]) for i in order)
    again = Ragged.from_flat(packed.values, packed.offsets)
    assert [r.tolist() for r in again] == [r.tolist() for r in taken]


def test_neighbouring_rows_are_packed_without_a_copy():
    ragged = Ragged.from_rows([[1, 2], [3], [4, 5, 6]], "int32")
    part = ragged.take([1, 2]).packed()
    assert np.shares_memory(part.values, ragged.values) and part.values.tolist() == [3, 4, 5, 6]


def test_text_survives_as_utf8_bytes():
    texts = ["", "a + b = 3", "Größe 数"]
    ragged = Ragged.from_text(texts)
    assert [ragged.text(i) for i in range(3)] == texts


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("reward", np.ones(2), "float32 per row: got float64"),
        ("reward", np.ones((2, 2), np.float32), "shape"),
        ("reward", Ragged.from_rows([[1.0]], "float32"), "variable length"),
        ("response_ids", [np.ones(2, np.int64)], "rows of int32: got int64"),
        ("response_ids", Ragged.from_rows([[1]], "int64"), "rows of int32: got int64"),
        ("response_ids", [np.ones((2, 2), np.int32)], "one dimension"),
        ("respone_ids", [], "did you mean 'response_ids'"),
    ],
)
def test_values_of_another_kind_or_dtype_are_refused_by_name(column, values, message):
    with pytest.raises(DockError, match=message):
        packed(GRPO_COLUMNS, column, values)


def test_plain_lists_and_empty_rows_take_the_declared_dtype():
    assert packed(GRPO_COLUMNS, "reward", [1, 0.5])[0].values.dtype == np.float32
    ragged = packed(GRPO_COLUMNS, "response_ids", [[1, 2], np.array([])])[0]
    assert ragged.values.dtype == np.int32 and ragged.lengths.tolist() == [2, 0]


def test_impossible_declarations_are_refused():
    with pytest.raises(DockError, match="dtype 'object'"):
        ColumnSpec("x", "object")
    with pytest.raises(DockError, match="same name"):
        Schema([ColumnSpec("x", "int8")] * 2, [])
    with pytest.raises(DockError, match="unknown column 'y'"):
        Schema([ColumnSpec("x", "int8")], [TaskSpec("t", ("y",))])


def test_training_waits_for_reference_logprobs_only_where_there_is_a_reference():
    without, with_reference = ({t.name: t.columns for t in grpo_tasks(flag)} for flag in (False, True))
    assert "reference" not in without and "ref_logprobs" not in without["train"]
    assert with_reference["reference"] == ("prompt_ids", "response_ids")
    assert set(with_reference["train"]) - set(without["train"]) == {"ref_logprobs"}
