"""Named arrays and one text as bytes: the safetensors format, whose `__metadata__` has the text as `document`.

Eight bytes with the length of the header, little end first; the header, a JSON object from names to dtype, shape and
place; the elements, little end first. Nothing here runs code of the sender's, and what is read are views of its bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from pydantic_core import from_json

CONTENT_TYPE = "application/x-safetensors"
LONGEST_HEADER = 16 << 20
MOST_TENSORS, MOST_DIMENSIONS = 1 << 18, 4
_ALIGNED = 8  # bytes; the data begins at a multiple

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode(document: str, tensors: Mapping[str, np.ndarray]) -> list[Any]:
    """Buffers that make the body one after the other; those of the arrays are not copied where they are contiguous.

    Raises ValueError for a dtype that the format does not have.
    """
    header: dict[str, Any] = {"__metadata__": {"document": document}}
    parts: list[Any] = []
    at = 0
    # Widest first: every tensor is aligned.
    for name, array in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        dtype = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
        if dtype not in NAMES:
            raise ValueError(f"{name}: arrays of {array.dtype} cannot be sent; {', '.join(map(str, NAMES))} can")
        header[name] = {"dtype": NAMES[dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
        if array.nbytes:
            parts.append(np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return [struct.pack("<Q", len(text)) + text, *parts]


def decode(body: bytes | bytearray | memoryview) -> tuple[str, dict[str, np.ndarray]]:
    """What `encode` was given. The arrays lie in `body`. Raises ValueError that says what is wrong with it."""
    view = memoryview(body)
    if len(view) < 8:
        raise ValueError(f"{len(view)} bytes are no safetensors body, whose first 8 say how long its header is")
    (length,) = struct.unpack_from("<Q", view)
    if length > min(LONGEST_HEADER, len(view) - 8):
        raise ValueError(
            f"its first 8 bytes say that the header has {length} bytes; {len(view) - 8} follow, {LONGEST_HEADER} may"
        )
    header = from_json(bytes(view[8 : 8 + length]))
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}, not an object")
    about = header.pop("__metadata__", {})
    document = about.get("document") if isinstance(about, dict) else None
    if not isinstance(document, str):
        raise ValueError("__metadata__ has no text `document`, the JSON part of the call")
    if len(header) > MOST_TENSORS:
        raise ValueError(f"it has {len(header)} tensors, at most {MOST_TENSORS} are possible")
    data = view[8 + length :]
    places = [_place(name, entry, len(data)) for name, entry in header.items()]
    _refuse_gaps(places, len(data))
    arrays = {}
    for first, last, name, dtype, shape in places:
        raw = np.frombuffer(data[first:last], np.uint8)
        if dtype == np.bool_ and raw.size and raw.max() > 1:
            raise ValueError(f"tensor {name!r} has booleans other than 0 and 1")
        array = raw.view(dtype).reshape(shape)
        arrays[name] = array if array.flags.aligned else array.copy()
    return document, arrays


_Place = tuple[int, int, str, np.dtype, tuple[int, ...]]  # first byte, last byte, name, dtype, shape


def _refuse_gaps(places: list[_Place], size: int) -> None:
    end = 0
    for first, last, name, *_ in sorted(places, key=lambda place: place[:2]):
        if first != end:
            raise ValueError(f"tensor {name!r} begins at byte {first}, the one before it ends at {end}")
        end = last
    if end != size:
        raise ValueError(f"the tensors have {end} bytes, {size} follow the header")


def _place(name: str, entry: Any, size: int) -> _Place:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {str(dtype)[:40]!r}; there are {', '.join(DTYPES)}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n <= size for n in numbers):
            raise ValueError(f"tensor {name!r}: {what} is a list of numbers from 0 to the {size} bytes there are")
    if len(shape) > MOST_DIMENSIONS or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: shape has at most {MOST_DIMENSIONS} numbers, data_offsets has 2")
    first, last = offsets
    if last - first != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"tensor {name!r} of shape {shape} and {dtype} does not fill bytes {first} to {last}")
    return first, last, name, DTYPES[dtype], tuple(shape)
