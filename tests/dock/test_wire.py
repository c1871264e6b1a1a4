"""Frames: what is sent is what arrives, and nothing else is believed."""

import contextlib
import random
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mindspeed_asyncflow.dock import wire
from mindspeed_asyncflow.dock.columns import DTYPES, NUMPY
from mindspeed_asyncflow.dock.wire import HEADER, WireError

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8)
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda d: arrays(np.uint8, st.tuples(st.integers(0, 5), st.just(NUMPY[d].itemsize * 3))).map(
        lambda raw: as_dtype(raw, d)
    )
)


def as_dtype(raw, name: str):
    """Random bytes as [n, 3] of a dtype; a bool is 0 or 1."""
    return (raw & 1).view(bool) if name == "bool" else raw.view(NUMPY[name])


def decode(frame: bytes, most_bytes: int = 1 << 20) -> wire.Message:
    header = wire.decode_header(frame[: HEADER.size], most_bytes)
    return wire.decode_body(header, memoryview(frame)[HEADER.size :])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=5), PLAIN | ARRAYS, max_size=6))
def test_a_message_arrives_to_the_bit(message):
    got = decode(b"".join(wire.encode(3, 0, 7, 9, message)))
    assert got.keys() == message.keys()
    for name, value in message.items():
        if isinstance(value, np.ndarray):
            assert got[name].dtype == value.dtype and got[name].shape == value.shape
            assert got[name].tobytes() == value.tobytes()
        else:
            assert got[name] == value and type(got[name]) is type(value)


def test_the_header_keeps_identity_and_verb():
    frame = b"".join(wire.encode(5, 1, 1 << 62, 1 << 40, {}))
    header = wire.decode_header(frame[: HEADER.size], 100)
    assert (header.verb, header.status, header.client, header.request) == (5, 1, 1 << 62, 1 << 40)


def test_sizes_are_checked_before_anything_is_read():
    raw = HEADER.pack(wire.MAGIC, wire.VERSION, 1, 0, 10, 0, 0, 1 << 50, 0)
    with pytest.raises(WireError, match="at most 1000"):
        wire.decode_header(raw, 1000)
    with pytest.raises(WireError, match="and 5 of bulk"):
        wire.decode_header(HEADER.pack(wire.MAGIC, wire.VERSION, 1, 0, 10, 0, 0, 10, 5), 1000, 4)
    for wrong in (b"XXXX" + raw[4:], raw[:4] + struct.pack("<H", 99) + raw[6:]):
        with pytest.raises(WireError, match="expected"):
            wire.decode_header(wrong, 1 << 60)
    with pytest.raises(WireError, match="101 of plain"):
        wire.decode_header(HEADER.pack(wire.MAGIC, wire.VERSION, 1, 0, 101, 0, 0, 100, 0), 1000)


@pytest.mark.parametrize(
    "table",
    [
        [["a", "object", [1]]],
        [["a", "int64", [1 << 62]]],
        [["a", "int64", [-1]]],
        [["a", "int64", [True]]],
        [["a", "int64", []]],
        [["a", "int64", [2]]],
        [["a", "int8", [0]]],
        [[["a"], "int8", [8]]],
        [["a", ["int8"], [8]]],
        ["a"],
        {"a": 1},
        [["a", "int8", [0]]] * 1000,
    ],
)
def test_impossible_array_descriptions_are_refused(table):
    text = msgspec.msgpack.encode([{}, table])
    size = len(text) + -len(text) % 8 + 8
    header = wire.Header(1, 0, len(text), 0, 0, size)
    with pytest.raises(WireError):
        wire.decode_body(header, memoryview(text + bytes(size - len(text))))


@pytest.mark.parametrize(
    "plain",
    [
        msgspec.msgpack.encode({"a": msgspec.msgpack.Ext(5, b"code")}),
        b"\x81\xa1a" + b"\x91" * 100_000 + b"\x90",
        b"\x81\xa1\xff\x00",
        b"\x81\x05\x00",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ],
    ids=["extension", "deep", "no utf-8", "key", "huge map", "huge text"],
)
def test_descriptions_with_extensions_depth_or_false_sizes_are_refused(plain):
    text = b"\x92" + plain + b"\x90"
    padded = text + bytes(-len(text) % 8)
    with pytest.raises(WireError):
        wire.decode_body(wire.Header(1, 0, len(text), 0, 0, len(padded)), memoryview(padded))


def test_what_no_frame_can_carry_is_refused_where_it_is_made():
    for wrong in ("\ud800", 10**30, object()):
        with pytest.raises(WireError, match="no frame can"):
            wire.encode(1, 0, 1, 1, {"x": wrong})


def test_random_bytes_are_refused_and_never_crash():
    rng = random.Random(0)
    good = b"".join(wire.encode(4, 0, 1, 2, {"rows": np.arange(20), "task": "train", "count": 3}))
    for _ in range(3000):
        frame = bytearray(good)
        for _ in range(rng.randint(1, 8)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        frame = frame[: rng.randrange(HEADER.size, len(frame) + 1)]
        try:
            message = decode(bytes(frame))
            for getter in (message.text, message.whole, message.real, message.flag, message.names, message.ints):
                for name in ("rows", "task", "count"):
                    with contextlib.suppress(WireError):
                        getter(name)
        except WireError:
            pass


def test_getters_take_no_other_type_for_the_one_they_name():
    message = wire.Message(number=1, flag=True, text="x", infinite=float("inf"), matrix=np.zeros((2, 2), np.int64))
    for getter, name in [
        (message.whole, "flag"), (message.real, "flag"), (message.real, "infinite"), (message.flag, "number"),
        (message.text, "number"), (message.names, "text"), (message.ints, "matrix"), (message.ints, "absent"),
    ]:  # fmt: skip
        with pytest.raises(WireError, match=name):
            getter(name)


def test_only_the_right_secret_answers_a_challenge():
    challenge = b"c" * wire.CHALLENGE_BYTES
    assert wire.knows_secret(b"s", challenge, wire.answer(b"s", challenge))
    for wrong in (wire.answer(b"t", challenge), wire.answer(b"s", b"d" * 32), np.empty(0, np.uint8)):
        assert not wire.knows_secret(b"s", challenge, wrong)
