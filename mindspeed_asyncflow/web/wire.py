"""Bodies of calls and answers: JSON, or JSON with arrays beside it in the safetensors format. Never pickle.

A *document* is what a body says: JSON values, in which arrays may stand. An array is a numpy array with one value per
row, or a list of arrays, one per row, of any lengths. In a JSON body arrays are lists, and `null` is NaN. In a
safetensors body a tensor is named by its place in the document, `columns/rewards`; a list of arrays is two tensors, all
rows one after the other and `columns/response_ids:lengths`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic_core import from_json

from mindspeed_asyncflow.web import tensors

JSON, TENSORS, LINES = "application/json", tensors.CONTENT_TYPE, "application/x-ndjson"
LENGTHS = ":lengths"
_DEEPEST_PLACE = 8
_TAKEN = object()


def pack(document: Any) -> tuple[str, list[Any]]:
    """Content type and buffers of a body: safetensors where the document has arrays, else JSON."""
    arrays: dict[str, np.ndarray] = {}
    rest = _take_arrays(document, "", arrays)
    if not arrays:
        return JSON, [to_json(rest)]
    return TENSORS, tensors.encode(to_json(rest).decode(), arrays)


def to_json(document: Any) -> bytes:
    """The document as JSON, arrays as lists, NaN and infinities as null."""
    return json.dumps(plain(document), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def unpack(content_type: str, body: bytes | bytearray) -> Any:
    """The document of a body. Raises ValueError that says what is wrong with it."""
    if content_type == JSON:
        return _json(body)
    text, arrays = tensors.decode(body)
    return _put_arrays(_json(text.encode()), arrays)


def plain(value: Any) -> Any:
    """JSON values only."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist()) if value.dtype.kind in "biu" else plain(value.astype(np.float64).tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def is_rows(value: Any) -> bool:
    """Whether it is one array per row."""
    return isinstance(value, list) and bool(value) and all(isinstance(row, np.ndarray) for row in value)


def _json(text: bytes | bytearray) -> Any:
    try:
        return from_json(text, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None


def _take_arrays(value: Any, place: str, arrays: dict[str, np.ndarray]) -> Any:
    """The value without its arrays, which are then in `arrays` by their places."""
    if isinstance(value, Mapping):
        left = {str(key): _take_arrays(item, f"{place}/{key}", arrays) for key, item in value.items()}
        return {key: item for key, item in left.items() if item is not _TAKEN}
    if isinstance(value, np.ndarray) and place:
        arrays[place[1:]] = value
        return _TAKEN
    if is_rows(value):
        arrays[place[1:]] = np.concatenate(value)
        arrays[place[1:] + LENGTHS] = np.fromiter(map(len, value), np.int64, len(value))
        return _TAKEN
    if isinstance(value, list | tuple) and not all(isinstance(item, str) for item in value):
        return [_take_arrays(item, f"{place}/{index}", arrays) for index, item in enumerate(value)]
    return value


def _put_arrays(document: Any, arrays: dict[str, np.ndarray]) -> Any:
    if not isinstance(document, dict):
        raise ValueError("the JSON part beside tensors is an object")
    lengths = {name.removesuffix(LENGTHS): array for name, array in arrays.items() if name.endswith(LENGTHS)}
    for name in lengths:
        if name not in arrays or name.endswith(LENGTHS):
            raise ValueError(f"tensor {name + LENGTHS!r} has no tensor {name!r} beside it")
    for name, array in arrays.items():
        if name.endswith(LENGTHS):
            continue
        if array.ndim == 0:
            raise ValueError(f"tensor {name!r} has no dimension; a single number belongs into the document")
        _put(document, name, _rows(name, array, lengths[name]) if name in lengths else array)
    return document


def _rows(name: str, values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    if lengths.ndim != 1 or lengths.dtype != np.int64 or (lengths.size and lengths.min() < 0):
        raise ValueError(f"tensor {name + LENGTHS!r} is a list of I64 from 0 on")
    if (lengths.size and lengths.max() > len(values)) or int(lengths.sum()) != len(values):
        raise ValueError(f"the lengths of {name!r} do not come to its {len(values)} values")
    ends = np.cumsum(lengths).tolist()
    return [values[end - length : end] for end, length in zip(ends, lengths.tolist())]


def _put(document: Any, name: str, value: Any) -> None:
    """At its place, which must be free."""
    *way, last = name.split("/")
    if len(way) >= _DEEPEST_PLACE:
        raise ValueError(f"tensor {name[:80]!r}: no place is deeper than {_DEEPEST_PLACE}")
    here = document
    for step in way:
        if isinstance(here, list) and step.isascii() and step.isdigit() and len(step) < 8 and int(step) < len(here):
            here = here[int(step)]
        elif isinstance(here, dict):
            here = here.setdefault(step, {})
        else:
            raise ValueError(f"tensor {name!r} has no place in the document")
    if not isinstance(here, dict) or last in here:
        raise ValueError(f"tensor {name!r}: its place in the document is taken, or is in no object")
    here[last] = value
