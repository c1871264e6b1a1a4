"""What callers may give: each check answers with the name of the argument, the value, and what it should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.errors import DockError

_LONGEST_NAME = 256
_LONGEST_S = 1e9


def whole(name: str, value: Any, low: int = -(1 << 63), high: int = (1 << 63) - 1) -> int:
    """A whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        bounds = "" if (low, high) == (-(1 << 63), (1 << 63) - 1) else f" from {low} to {high}"
        raise DockError(f"{name} must be a whole number{bounds}, got {value!r}")
    return int(value)


def seconds(name: str, value: Any) -> float:
    """A finite time, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= value <= _LONGEST_S:
        raise DockError(f"{name} must be a number of seconds, 0 or more, got {value!r}")
    return float(value)


def text(name: str, value: Any) -> str:
    """A name of 1 to 256 characters."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
        shown = repr(value) if not isinstance(value, str) or len(value) < 40 else f"{len(value)} characters"
        raise DockError(f"{name} must be a name of 1 to {_LONGEST_NAME} characters, got {shown}")
    return value


def names(name: str, values: Any) -> list[str]:
    """A list of names, none of them twice; a single string is not one."""
    if isinstance(values, str) or not isinstance(values, (list, tuple, set, frozenset)):
        raise DockError(f"{name} must be a list of names, got {values!r}")
    found = [text(f"each of {name}", value) for value in values]
    if len(set(found)) != len(found):
        raise DockError(f"{name} names something twice: {found}")
    return found


def numbers(name: str, values: Sequence[int] | np.ndarray, dtype: str = "int64") -> np.ndarray:
    """Whole numbers [n] that `dtype` can hold; floats, text and other dimensions are refused."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise DockError(f"{name} must be whole numbers [n]: {error}") from error
    if not array.size:
        return np.empty(0, dtype)
    limits = np.iinfo(dtype)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DockError(f"{name} must be whole numbers [n], got {array.dtype} {list(array.shape)}")
    if array.min() < limits.min or array.max() > limits.max:
        raise DockError(f"{name} must fit into {dtype}, got values from {array.min()} to {array.max()}")
    return array.astype(dtype, copy=False)


def versions(pair: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(oldest, newest) policy version of each row, int32 [rows] each."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DockError(f"versions must be two arrays, the oldest and the newest version of each row, got {type(pair)}")
    low, high = (numbers("versions", half, "int32") for half in pair)
    if len(low) != rows or len(high) != rows:
        raise DockError(f"versions must have one entry per row, got {len(low)} and {len(high)} for {rows} rows")
    return low, high


def server(lease_s: float, max_rows: int, pair: int, host: str, secret: bytes, life: int) -> None:
    """Raises DockError for settings with which no pair can work."""
    if not (isinstance(lease_s, (int, float)) and math.isfinite(lease_s) and lease_s > 0):
        raise DockError(f"lease_s must be a number of seconds above 0, got {lease_s!r}")
    whole("max_rows", max_rows, 0)
    whole("pair", pair, 0, 255)
    whole("life", life, 0, 31)  # numbers of partitions and claims are cut into so many parts
    if not secret and not (host.startswith("127.") or host in ("localhost", "::1")):
        raise DockError(f"a dock that listens on {host} needs a secret: everybody on that network can reach it")
