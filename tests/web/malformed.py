"""Requests that are wrong in many ways, the same ones for the same seed: right ones that were then spoiled."""

from __future__ import annotations

import copy
import gzip
import json
import random
import struct
from typing import Any, NamedTuple

import numpy as np

from mindspeed_asyncflow.web import wire


class Request(NamedTuple):
    kind: str  # of spoiling
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    hopeless: bool  # nothing right is left: it must be refused


_ANSWER = {"response_ids": [3, 4], "rollout_logprobs": [-0.5, -0.25], "version": 0, "finished": True}
RIGHT: dict[str, dict[str, Any]] = {
    "init_engines": {"overrides": {"trainer.steps": 3, "rollout.temperature": 1.0}, "timeout_s": 0.05},
    "put_prompts_data": {
        "prompts": [{"prompt": "1+1=", "truth": "2", "fields": {"a": [1, {"b": None}]}}],
        "last": False,
    },
    "get_experience_data": {"task": "reward", "columns": ["response_ids", "truth"], "groups": 1, "timeout_s": 0.0},
    "put_experience_data": {"claim": 1, "rows": [1000, 1001], "columns": {"rewards": [0.5, None]}},
    "put_trajectories": {
        "groups": [{"prompt": {"prompt": [5, 6]}, "answers": [_ANSWER, _ANSWER], "rewards": [1, 0.5]}]
    },
    "weight_sync_notify": {"version": 1, "timeout_s": 0.05},
    "evaluate": {"timeout_s": 0.05},
    "checkpoint": {"timeout_s": 0.05},
    "export": {"timeout_s": 0.05},
    "stop": {"now": False, "timeout_s": 0.05},
}
NASTY: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**63) - 1, 10**300, 1e308, -1e308, 1e-320, "", " ", "\x00", "a\x00b",
    "../../../../etc/passwd", "..\\..\\windows", "/etc/shadow", "file:///etc/passwd", "os:system", "builtins:eval",
    "__class__", "__import__('os').system('true')", "${HOME}", "{{7*7}}", "%s%n", "'; DROP TABLE rows; --", "é" * 99,
    "\u202e", "x" * 5000, [], {}, [[]], [None], [[[[]]]], {"": {}}, ["a", 1], [1, "a"], [True, 1], [1.5, None, "x"],
    [2**70], [[1], [2, 3]], [[1.5], ["x"]], {"prompt": {"prompt": "x"}}, {"$ref": "#"}, {"__proto__": 1}, "NaN", 5e-324,
    "Infinity",
]  # fmt: skip


def requests(seed: int, count: int) -> list[Request]:
    return [_spoiled(random.Random(f"{seed}:{index}")) for index in range(count)]


def _spoiled(rng: random.Random) -> Request:
    verb = rng.choice(list(RIGHT))
    document = copy.deepcopy(RIGHT[verb])
    kind = rng.choice(list(_WAYS))
    body, headers, hopeless = _WAYS[kind](rng, document)
    headers.setdefault("content-type", wire.JSON)
    return Request(kind, "POST", f"/api/{verb}", headers, body, hopeless)


Spoiled = tuple[bytes, dict[str, str], bool]


def _text(document: Any) -> bytes:
    return json.dumps(document).encode()


def _leaves(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in it."""
    found: list[tuple[Any, Any]] = []
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        found.append((document, key))
        if isinstance(value, dict | list):
            found += _leaves(value)
    return found


def _cut(rng: random.Random, document: Any) -> Spoiled:
    text = _text(document)
    return text[: rng.randrange(1, len(text))], {}, True


def _flipped(rng: random.Random, document: Any) -> Spoiled:
    text = bytearray(_text(document))
    for _ in range(rng.randint(1, 4)):
        text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text), {}, False


def _nasty(rng: random.Random, document: Any) -> Spoiled:
    container, key = rng.choice(_leaves(document))
    container[key] = rng.choice(NASTY)
    return _text(document), {}, False


def _unknown(rng: random.Random, document: Any) -> Spoiled:
    document[rng.choice(["nothing", "__class__", "path", "../x", "Prompts", "code", "timeout_S"])] = rng.choice(NASTY)
    return _text(document), {}, True


def _missing(rng: random.Random, document: Any) -> Spoiled:
    document.pop(rng.choice(list(document)))
    return _text(document), {}, False


def _nested(rng: random.Random, document: Any) -> Spoiled:
    deep = rng.choice([b"[", b'{"a":', b'[{"prompts":[']) * rng.choice([201, 5000, 100_000])
    return deep, {}, True


def _huge_number(rng: random.Random, document: Any) -> Spoiled:
    return b'{"claim":' + b"9" * rng.choice([400, 5000, 50_000]) + b"}", {}, True


def _encoded(rng: random.Random, document: Any) -> Spoiled:
    name = rng.choice(["utf-16", "utf-32", "utf-8-sig", "surrogate", "latin", "gzip"])
    text = _text(document)
    if name == "surrogate":
        return text.replace(b'"', b'"\xed\xa0\x80', 1), {}, True
    if name == "latin":
        return text.replace(b'"', b'"\xe9\xff', 1), {}, True
    if name == "gzip":
        return gzip.compress(text), {"content-encoding": "gzip"}, True
    return text.decode().encode(name), {}, True


def _wrong_type(rng: random.Random, document: Any) -> Spoiled:
    kinds = [
        "",
        "text/plain",
        "application/x-python-pickle",
        "multipart/form-data; boundary=x",
        "application/xml",
        "*/*",
    ]
    return _text(document), {"content-type": rng.choice(kinds)}, True


def _other_value(rng: random.Random, document: Any) -> Spoiled:
    return (
        rng.choice([b"null", b"[]", b"1", b'"x"', b"true", b"\x00", b"\x80\x04\x95.", b"<a/>", b"a=1", b"NaN"]),
        {},
        True,
    )


def _length(rng: random.Random, document: Any) -> Spoiled:
    said = rng.choice([str(10**12), str(2**64), "9" * 40, "1" + "0" * 19, str(1 << 31)])
    return b"", {"content-length": said}, True


def _many_headers(rng: random.Random, document: Any) -> Spoiled:
    return _text(document), {f"x-{n}": "v" for n in range(rng.choice([65, 200]))}, True


def _no_setting(rng: random.Random, document: Any) -> Spoiled:
    keys = [
        "data.path",
        "model.folder",
        "run.folder",
        "rewards.scorer",
        "rollout.engine",
        "cluster.ssh",
        "a",
        "trainer.steps.x",
    ]
    key, value = rng.choice(keys), rng.choice(["/etc/passwd", "os:system", "../../x", 1, None, True])
    return _text({"overrides": {key: value}, "prompts": {key: value}}), {}, True


def _tensors(rng: random.Random, document: Any) -> Spoiled:
    """A safetensors body whose header lies."""
    header: dict[str, Any] = {
        "__metadata__": {"document": json.dumps({"claim": 1, "columns": {}})},
        "rows": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
        "columns/rewards": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
    }
    data = np.arange(6, dtype=np.float32).tobytes()
    length: int | None = None
    way = rng.randrange(14)
    rows = header["rows"]
    if way == 0:
        length = rng.choice([2**64 - 1, 2**63, 1 << 40, 0, 1, 7])
    elif way == 1:
        rows["data_offsets"] = rng.choice(
            [[0, 17], [8, 0], [-8, 8], [0, 2**63], [0], [0, 16, 16], ["0", "16"], None, [0.0, 16.0]]
        )
    elif way == 2:
        rows["shape"] = rng.choice(
            [[2**62, 2**62], [-2], [3], [2] * 9, ["2"], 2, None, [[2]], [2**70], [1, 1, 1, 1, 2]]
        )
    elif way == 3:
        rows["dtype"] = rng.choice(["I65", "object", None, 7, ["I64"], "i8", "O", {}])
    elif way == 4:
        header["columns/rewards"]["data_offsets"] = [8, 16]
    elif way == 5:
        header["__metadata__"] = rng.choice(
            [{}, None, [], {"document": 1}, {"document": "{"}, {"document": "[]"}, {"document": "1"}]
        )
    elif way == 6:
        header["rows"] = rng.choice([None, [], "x", {"dtype": "I64"}, {**rows, "code": "x"}])
    elif way == 7:
        data = data[: rng.randrange(len(data))]
    elif way == 8:
        data += b"more"
    elif way == 9:
        name = rng.choice(
            ["../../etc/passwd", "/rows", "a/" * 20 + "b", "claim/x", "claim", "columns", "rows/0/x", "", "/"]
        )
        header[name] = header.pop("columns/rewards")
    elif way == 10:
        header["nothing:lengths"] = header.pop("columns/rewards")
    elif way == 11:
        header["rows:lengths"] = header.pop("columns/rewards")
    elif way == 12:
        text = rng.choice([b"[]", b"null", b"[" * 5000, b"\xff\xfe", b"{", b'{"a":' * 300])
        return struct.pack("<Q", len(text)) + text + data, {"content-type": wire.TENSORS}, True
    else:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 60))), {"content-type": wire.TENSORS}, True
    text = json.dumps(header).encode()
    body = struct.pack("<Q", len(text) if length is None else length) + text + data
    return body, {"content-type": wire.TENSORS}, True


_WAYS = {
    "cut": _cut, "flipped": _flipped, "nasty": _nasty, "unknown field": _unknown, "missing field": _missing,
    "nested": _nested, "huge number": _huge_number, "encoding": _encoded, "content type": _wrong_type,
    "other value": _other_value, "length": _length, "headers": _many_headers, "setting": _no_setting,
    "tensors": _tensors,
}  # fmt: skip
