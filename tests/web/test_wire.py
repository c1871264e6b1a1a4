"""Arrays cross as they are, by both kinds of body; other programs can read and write them."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from mindspeed_asyncflow.web import arrays, tensors, wire

ALL = [np.dtype(name) for name in ("bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")]
ALL += [np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]


def there_and_back(document):
    kind, parts = wire.pack(document)
    return kind, wire.unpack(kind, b"".join(parts))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_arrays_of_every_type_cross_bit_for_bit(dtype):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2, 24).astype(dtype).reshape(2, 3, 4)
    rows = [values[0, 0, :k] for k in (0, 4, 1)]
    document = {
        "a": values,
        "x": {"rows": rows, "n": 3},
        "list": [{"b": values[0]}, {"b": None}],
        "texts": ["é", "\x00"],
    }
    kind, got = there_and_back(document)
    assert kind == wire.TENSORS
    assert got["a"].dtype == dtype and got["a"].shape == (2, 3, 4) and got["a"].tobytes() == values.tobytes()
    assert [row.tolist() for row in got["x"]["rows"]] == [row.tolist() for row in rows]
    assert got["list"][0]["b"].shape == (3, 4) and got["list"][1] == {"b": None}
    assert got["x"]["n"] == 3 and got["texts"] == ["é", "\x00"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), min_size=1, max_size=9), st.integers(0, 2))
def test_rows_of_any_lengths_cross(rows, inner):
    shape = (-1, inner) if inner else (-1,)
    columns = [np.array(row[: len(row) // max(inner, 1) * max(inner, 1)], np.int32).reshape(shape) for row in rows]
    _, got = there_and_back({"columns": {"c": columns}})
    for row, back in zip(columns, got["columns"]["c"]):
        assert back.dtype == np.int32 and back.shape == row.shape and (back == row).all()


def test_bodies_are_safetensors_files():
    document = {"claim": 1, "columns": {"rewards": np.array([1, np.nan], np.float32)}}
    _, parts = wire.pack(document)
    assert np.isnan(load(b"".join(parts))["columns/rewards"][1])
    theirs = save({"rows": np.array([4, 5])}, metadata={"document": '{"claim": 7}'})
    got = wire.unpack(wire.TENSORS, theirs)
    assert got["claim"] == 7 and got["rows"].tolist() == [4, 5]


def test_what_is_read_shares_the_bytes_that_came():
    kind, parts = wire.pack({"a": np.arange(1000)})
    body = bytearray(b"".join(parts))
    assert np.shares_memory(wire.unpack(kind, body)["a"], np.frombuffer(body, np.uint8))


def test_a_tensor_that_lies_askew_is_read_too():
    header = '{"__metadata__":{"document":"{}"},"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}'
    for extra in range(8):
        text = header.encode() + b" " * extra
        body = len(text).to_bytes(8, "little") + text + np.int64(5).tobytes()
        got = tensors.decode(body)[1]["a"]
        assert got.tolist() == [5] and got.flags.aligned


def test_json_lists_become_arrays_and_null_is_nan():
    assert arrays.values_of_rows([1, 2]).dtype == np.int64
    assert arrays.values_of_rows([True, False]).dtype == np.bool_
    assert np.isnan(arrays.values_of_rows([1, None])[1])
    assert [row.dtype for row in arrays.values_of_rows([[1], [], [2.5]])] == [np.float64] * 3
    assert [row.tolist() for row in arrays.values_of_rows([[1, 2], []])] == [[1, 2], []]
    assert arrays.values_of_rows([[[1, 2], [3, 4]]])[0].shape == (2, 2)
    assert arrays.values_of_rows(["a"]) == ["a"]


@pytest.mark.parametrize(
    "value", [[True, 1], ["a", 1], [[1], 2], [[[1], [2, 3]]], [2**63], [{}], {}, "abc", None, [[None, "x"]], [[[[1]]]]]
)
def test_what_is_no_column_is_refused(value):
    with pytest.raises(ValueError):
        arrays.values_of_rows(value)


def test_json_of_answers_has_no_nan():
    told = {
        "a": float("nan"),
        "b": np.float32("inf"),
        "c": np.array([1.5, np.nan]),
        "d": np.bool_(True),
        "e": (1, None),
    }
    assert wire.to_json(told) == b'{"a":null,"b":null,"c":[1.5,null],"d":true,"e":[1,null]}'
