"""Arrays in Ray's messages as type, shape and bytes.

numpy pickles an array with the names of its own modules, which differ between releases: numpy 1 cannot read what numpy
2 wrote. The processes of a run may live in environments of different releases.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray.util

_SCALARS = (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64, np.str_),
)


def send_arrays_plainly() -> None:
    """From now on this process does, which must be connected to Ray; every process can read them."""
    ray.util.register_serializer(np.ndarray, serializer=taken_apart, deserializer=put_together)
    for kind in _SCALARS:
        ray.util.register_serializer(kind, serializer=taken_apart, deserializer=_scalar)


def taken_apart(array: np.ndarray | np.generic) -> tuple[str, tuple[int, ...], bytes]:
    """Raises TypeError for elements that are Python objects or records: they have no layout that others know."""
    if array.dtype.hasobject or array.dtype.fields:
        raise TypeError(f"an array of {array.dtype} was to cross to another process; only numbers and text can")
    return array.dtype.str, array.shape, array.tobytes()


def put_together(parts: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    """Read-only, as are all arrays that come out of Ray."""
    kind, shape, data = parts
    return np.frombuffer(data, dtype=kind).reshape(shape) if data else np.zeros(shape, dtype=kind)


def _scalar(parts: tuple[str, tuple[int, ...], bytes]) -> Any:
    return put_together(parts)[()]
