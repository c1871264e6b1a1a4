"""Values and claims cut over pairs and put together again."""

import ml_dtypes
import numpy as np
import pytest

from mindspeed_asyncflow.dock.columns import ColumnSpec, Schema
from mindspeed_asyncflow.dock.gather import (
    check_groups,
    check_lengths,
    cuttable,
    join_claims,
    merge_values,
    take,
    weigh,
)
from mindspeed_asyncflow.dock.pair import Claim
from mindspeed_asyncflow.dock.ragged import Ragged
from mindspeed_asyncflow.errors import DockError

SCHEMA = Schema(
    [
        ColumnSpec("shared", "int32", "ragged", shared=True), ColumnSpec("x", "int32", "ragged"),
        ColumnSpec("y", "float32"), ColumnSpec("t", "uint8", "text"), ColumnSpec("b", "bfloat16", "ragged", shape=(2,)),
    ],
    [],
)  # fmt: skip


def forms() -> dict:
    blocks = [np.arange(2 * n, dtype=np.float32).reshape(n, 2).astype(ml_dtypes.bfloat16) for n in (1, 0, 3, 2)]
    flat = np.arange(9, dtype=np.int32)
    return {
        "rows": [np.arange(n, dtype=np.int32) for n in (3, 0, 1, 5)],
        "ragged": Ragged.from_flat(flat, np.array([0, 3, 3, 4, 9])),
        "inner": Ragged.from_flat(np.concatenate(blocks), np.array([0, 1, 1, 4, 6])),
        "block": np.arange(12.0).reshape(4, 3),
        "text": ["a", "", "ccc", "d"],
    }


@pytest.mark.parametrize("kind", forms())
@pytest.mark.parametrize("seed", range(5))
def test_what_was_cut_over_pairs_is_whole_again_whatever_its_form(kind, seed):
    rng = np.random.default_rng(seed)
    values = forms()[kind]
    home = rng.integers(0, 3, 4)
    index = [np.flatnonzero(home == h) for h in range(3)]
    parts = [take(values, i) for i in index if len(i)]
    order = np.argsort(np.concatenate([i for i in index if len(i)]), kind="stable")
    merged = merge_values(parts, order)
    assert len(merged) == 4
    for i in range(4):
        old, new = (np.asarray(v[i]) for v in (values, merged))
        assert old.dtype == new.dtype and old.shape == new.shape and old.tobytes() == new.tobytes()


def test_tensors_tuples_and_lists_can_be_cut_and_a_lone_text_is_refused():
    torch = pytest.importorskip("torch")
    cut = cuttable(SCHEMA, {
        "y": torch.tensor([1.0, 2.0, 3.0]), "b": torch.ones(3, 4, 2, dtype=torch.bfloat16), "x": ([1], [2, 3], []),
    })  # fmt: skip
    assert take(cut["y"], np.array([2, 0])).tolist() == [3.0, 1.0]
    assert take(cut["b"], np.array([1])).dtype == ml_dtypes.bfloat16
    assert take(cut["x"], np.array([1, 2])) == [[2, 3], []]
    for wrong in ("text", b"bytes", None):
        with pytest.raises(DockError, match="'t' needs a sequence"):
            cuttable(SCHEMA, {"t": wrong})


def test_bytes_of_a_group_count_its_rows_and_its_shared_column_once():
    values = {
        "shared": [np.zeros(10, np.int32), np.zeros(0, np.int32)],
        "x": Ragged.from_rows([np.zeros(n, np.int32) for n in (1, 2, 3)], "int32"),
        "y": np.zeros(3, np.float32),
    }
    assert weigh(SCHEMA, values, np.array([2, 1])).tolist() == [40 + 12 + 8, 12 + 4]


def test_a_put_that_does_not_fit_together_is_refused_before_anything_is_sent():
    ids, sizes, counts, members = check_groups([4, 5], None, [2, 3], None)
    assert (ids.tolist(), sizes.tolist(), counts.tolist(), members.tolist()) == (
        [4, 5],
        [2, 3],
        [2, 3],
        [0, 1, 0, 1, 2],
    )
    assert check_groups([4, 5], [3, 3], None, None)[2].tolist() == [1, 1]
    for wrong in (([], None, None, None), ([1], [2, 3], None, None), ([1], None, [0], None), ([1], None, [2], [0])):
        with pytest.raises(DockError):
            check_groups(*wrong)
    check_lengths(SCHEMA, {"shared": [[1]], "y": [1.0, 2.0]}, 2, 1)
    for wrong in ({"shared": [[1], [2]]}, {"y": [1.0]}):
        with pytest.raises(DockError, match="expected"):
            check_lengths(SCHEMA, wrong, 2, 1)


def claim(rows: list[int], values: list | None, sealed: bool = False) -> Claim:
    n = np.array(rows, np.int64)
    small = n.astype(np.int32)
    return Claim(9, n, n // 10, small, small, small, n, [], sealed, None if values is None else {"x": values}, 5)


def test_grants_are_joined_in_the_order_of_their_coming_or_of_the_list():
    parts = [claim([30, 31], ["c", "C"]), claim([10, 11], ["a", "A"]), claim([20], ["b"])]
    joined = join_claims(parts, 9, None)
    assert joined.rows.tolist() == [30, 31, 10, 11, 20] and joined.values == {"x": ["c", "C", "a", "A", "b"]}
    listed = join_claims(parts, 9, [1, 2, 3])
    assert listed.rows.tolist() == [10, 11, 20, 30, 31] and listed.values == {"x": ["a", "A", "b", "c", "C"]}
    assert not listed.sealed and listed.tokens.tolist() == listed.rows.tolist()


def test_a_part_that_came_without_its_values_leaves_all_to_be_read():
    assert join_claims([claim([10], ["a"]), claim([20], None)], 9, None).values is None


def test_a_tail_is_no_end_and_an_empty_end_is():
    assert not join_claims([claim([10], ["a"]), claim([], None, sealed=True)], 9, None).sealed
    assert join_claims([claim([], None, sealed=True)], 0, None).sealed
