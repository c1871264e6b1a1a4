"""What was put comes back with the same kind, dtype and shape, to the bit, or is refused before a byte is stored."""

import ml_dtypes
import numpy as np
import pytest
import torch

from mindspeed_asyncflow.dock.columns import DTYPES, NUMPY, ColumnSpec, Ragged, TaskSpec
from mindspeed_asyncflow.dock.pair import PairClient
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import DockError

COLUMNS = (
    *(ColumnSpec(f"row_{name}", name, "ragged") for name in DTYPES),
    *(ColumnSpec(f"one_{name}", name) for name in DTYPES),
    ColumnSpec("dense", "bfloat16", shape=(8,)),
    ColumnSpec("matrix", "float32", shape=(2, 3)),
    ColumnSpec("points", "int16", "ragged", shape=(3,)),
    ColumnSpec("lists", "float8_e4m3fn", "nested"),
    ColumnSpec("turns", "int32", "nested", tokens=True),
    ColumnSpec("text", "uint8", "text"),
    ColumnSpec("raw", "uint8", "bytes"),
    ColumnSpec("note", "uint8", "text", shared=True),
    ColumnSpec("ids", "int32", "ragged"),
    ColumnSpec("score", "float32"),
)
TASKS = (TaskSpec("use", ("text", "turns", "dense")),)


@pytest.fixture(scope="module")
def served():
    with DockServer(COLUMNS, TASKS, arena_mb=8, secret="k") as server:
        yield server
        assert server.failure is None


@pytest.fixture(params=["mapped", "remote"])
def client(request, served):
    with PairClient(served.address, "k", wait_s=10.0, map_arena=request.param == "mapped") as made:
        yield made
        assert made.stats()["used_bytes"] == 0, "a test left rows or lost bytes"


def bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bit patterns, NaNs and infinities included."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(0, 256, (*shape, NUMPY[dtype].itemsize), np.uint8)
    return raw.view(NUMPY[dtype])[..., 0]


def same(got, given) -> None:
    """Equal kind, dtype, shape and bits."""
    assert type(got) is type(given) or isinstance(got, Ragged)
    if isinstance(given, np.ndarray):
        assert got.dtype == given.dtype and got.shape == given.shape and got.tobytes() == given.tobytes()
    elif isinstance(given, (str, bytes)):
        assert got == given
    else:
        assert len(got) == len(given)
        for one, other in zip(got, given):
            same(one, other)


def values(rng: np.random.Generator, n: int, size: int) -> dict:
    def lengths() -> list[int]:
        return rng.integers(0, size, n).tolist()

    rows = {f"row_{d}": [bits(rng, d, (k,)) for k in lengths()] for d in DTYPES}
    rows |= {f"one_{d}": bits(rng, d, (n,)) for d in DTYPES}
    return rows | {
        "dense": bits(rng, "bfloat16", (n, 8)),
        "matrix": bits(rng, "float32", (n, 2, 3)),
        "points": [bits(rng, "int16", (k, 3)) for k in lengths()],
        "lists": [[bits(rng, "float8_e4m3fn", (k,)) for k in rng.integers(0, 4, m)] for m in rng.integers(0, 3, n)],
        "turns": [[bits(rng, "int32", (k,)) for k in rng.integers(0, size, m)] for m in rng.integers(0, 4, n)],
        "text": ["é数" * k + "x" for k in lengths()],
        "raw": [rng.bytes(k) for k in lengths()],
    }


@pytest.mark.parametrize(("n", "size"), [(1, 3), (7, 5), (40, 300)])
@pytest.mark.parametrize("copy", [False, True])
def test_every_kind_and_dtype_survives_the_round_trip_in_any_order(client, n, size, copy):
    rng = np.random.default_rng(n)
    given = values(rng, n, size)
    rows = client.put("p", values=given)[0]
    order = rng.permutation(n)
    got = client.read(rows[order], list(given), copy=copy)
    for name, column in given.items():
        expected = column[order] if isinstance(column, np.ndarray) else [column[i] for i in order]
        same(got[name], expected)
    again = client.read(rows[[0, 0]], ["turns", "text", "dense"])
    same(again["turns"], [given["turns"][0]] * 2)
    assert again["text"] == [given["text"][0]] * 2 and again["dense"].shape == (2, 8)
    client.free(rows)


def test_rows_of_no_element_at_all_survive_in_every_kind(client):
    given = {
        "row_int64": [np.empty(0, np.int64)] * 3, "points": [np.empty((0, 3), np.int16)] * 3, "text": [""] * 3,
        "lists": [[], [np.empty(0, ml_dtypes.float8_e4m3fn)], []], "raw": [b""] * 3,
    }  # fmt: skip
    rows = client.put("p", values=given)[0]
    for name, column in given.items():
        same(client.read(rows, [name])[name], column)
    client.free(rows)


def test_flat_values_with_offsets_and_rows_of_equal_length_are_taken_as_they_are(client):
    flat = Ragged.from_flat(np.arange(12, dtype=np.int16).reshape(4, 3), np.array([0, 1, 4]))
    rows = client.put("p", values={"points": flat, "row_int8": np.arange(6, dtype=np.int8).reshape(2, 3)})[0]
    got = client.read(rows, ["points", "row_int8"])
    assert [p.tolist() for p in got["points"]] == [[[0, 1, 2]], [[3, 4, 5], [6, 7, 8], [9, 10, 11]]]
    assert got["points"].stacked.shape == (4, 3) and got["points"][1].shape == (3, 3)
    assert [r.tolist() for r in got["row_int8"]] == [[0, 1, 2], [3, 4, 5]]
    client.free(rows)


def test_tensors_of_the_cpu_are_taken_also_in_dtypes_that_numpy_does_not_know(client):
    dense = torch.randn(3, 8).to(torch.bfloat16)
    ids = [torch.arange(k, dtype=torch.int32) for k in (2, 0, 5)]
    score = torch.tensor([1.5, -2.0, 0.0])
    eight = [torch.tensor([1.0, -0.5]).to(torch.float8_e4m3fn)]
    given = {"dense": dense, "ids": ids, "score": score, "lists": [eight, [], eight * 2]}
    rows = client.put("p", values=given)[0]
    got = client.read(rows, list(given))
    assert np.array_equal(got["dense"].astype(np.float32), dense.float().numpy())
    assert [r.tolist() for r in got["ids"]] == [[0, 1], [], [0, 1, 2, 3, 4]]
    assert got["score"].tolist() == [1.5, -2.0, 0.0]
    assert [[a.astype(float).tolist() for a in row] for row in got["lists"]] == [[[1, -0.5]], [], [[1, -0.5]] * 2]
    client.free(rows)


REFUSED = [
    ("score", np.ones(2), "float64"),
    ("score", np.float32(1.0), "shape"),
    ("score", [None, 1.0], "object"),
    ("score", None, "NoneType"),
    ("score", np.array([1.0, None], object), "object"),
    ("one_int32", [1.5, 2.0], "float64"),
    ("one_uint8", [1, 300], "300"),
    ("one_bool", [0, 1], "int64"),
    ("one_int8", ["a", "b"], "<U1"),
    ("dense", np.zeros((2, 7), ml_dtypes.bfloat16), r"\(2, 7\)"),
    ("dense", np.zeros((2, 8), np.float32), "float32"),
    ("matrix", [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32)], r"\(3, 2\)"),
    ("matrix", np.zeros((2, 6), np.float32), r"\(2, 6\)"),
    ("ids", [np.int32(1), np.int32(2)], "dimension"),
    ("ids", [[1.5], [2]], "float64"),
    ("ids", [np.zeros(2, np.int64), [1]], "int64"),
    ("ids", [None, [1]], "NoneType"),
    ("ids", ["ab", "c"], "str"),
    ("ids", [[[1], [2]], [1]], "dimension"),
    ("ids", np.zeros(2, np.int32), r"shape \(2,\)"),
    ("ids", [[1, 1 << 40], [1]], "int32|1099511627776"),
    ("points", [np.zeros((2, 2), np.int16)] * 2, r"\(2, 2\)"),
    ("points", [np.zeros(3, np.int16)] * 2, r"\(3,\)"),
    ("turns", [[1, 2], [3]], "dimension"),
    ("turns", [None, []], "NoneType"),
    ("turns", [np.zeros(2, np.int32), []], "ndarray"),
    ("turns", [[np.zeros(2, np.float32)], []], "float32"),
    ("text", ["a", b"b"], "bytes"),
    ("text", "ab", "str"),
    ("text", ["a", "\ud800"], "no text"),
    ("raw", ["a", b"b"], "str"),
    ("raw", b"ab", "bytes"),
    ("raw", [None, b"b"], "NoneType"),
]


@pytest.mark.parametrize(("column", "wrong", "seen"), REFUSED, ids=[f"{i}-{c}" for i, (c, _, _) in enumerate(REFUSED)])
def test_another_kind_dtype_or_shape_is_refused_by_the_name_of_its_column_and_nothing_is_stored(
    client, column, wrong, seen
):
    good = {"row_uint8": [[1], [2]]}
    for values_ in ({column: wrong} | good, good | {column: wrong}):
        with pytest.raises(DockError, match=rf"column '{column}'.*{seen}"):
            client.put("p", values=values_)
    rows = client.put("p", values=good)[0]
    with pytest.raises(DockError, match=f"column '{column}'"):
        client.write(rows, {column: wrong})
    with pytest.raises(DockError, match="not written yet"):
        client.read(rows, [column])
    client.free(rows)
    assert client.stats()["payload_bytes"] == 0


@pytest.mark.parametrize(
    ("dtype", "how", "message"),
    [
        ("object", {}, "dtype 'object'"),
        ("int32", {"kind": "list"}, "kind 'list'"),
        ("int32", {"kind": "text"}, "has dtype uint8"),
        ("int32", {"kind": "nested", "shape": (3,)}, "no inner shape"),
        ("int32", {"shape": (0,)}, "impossible inner shape"),
        ("int32", {"shape": (1 << 20, 1 << 20)}, "impossible inner shape"),
    ],
)
def test_impossible_columns_are_refused(dtype, how, message):
    with pytest.raises(DockError, match=message):
        ColumnSpec("x", dtype, **how)


def test_a_shared_text_is_stored_once_per_group(client):
    notes = ["the first", ""]
    rows = np.concatenate(client.put("p", [1, 2], [3, 1], [3, 1], values={"note": notes, "text": ["a", "b", "c", "d"]}))
    got = client.read(rows, ["note", "text"])
    assert got["note"] == ["the first"] * 3 + [""] and got["text"] == ["a", "b", "c", "d"]
    assert client.stats()["column_bytes"]["note"] == len("the first")
    client.free(rows)


def test_a_nested_column_has_one_ready_bit_and_counts_the_elements_of_its_rows_as_tokens(client):
    rows = client.put("n", values={"text": ["x", "y"]})[0]
    with pytest.raises(DockError, match="not written yet"):
        client.read(rows, ["turns"])
    client.write(rows, {"turns": [[[1, 2], [3]], [[], [4]]], "dense": np.zeros((2, 8), ml_dtypes.bfloat16)})
    claim = client.claim("use", 2, partition="n", worker="w", columns=["turns", "text"], timeout_s=0.0)
    assert claim.tokens.tolist() == [3, 1] and claim.ready == 0
    assert [[a.tolist() for a in row] for row in claim.values["turns"]] == [[[1, 2], [3]], [[], [4]]]
    assert claim.values["text"] == ["x", "y"]
    with pytest.raises(DockError, match=r"a result already"):
        client.write(rows, {"turns": [[[1, 2, 3]], [[], [4]]]})  # the same values, divided otherwise
    client.done(claim.claim_id)
    client.free(rows)
