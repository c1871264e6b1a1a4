"""Arrays out of what a body has: tensors as they are, lists of numbers as int64 or float64, null as NaN."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

_NUMBERS = {int, float, type(None)}
_TOKENS = np.iinfo(np.int32)


def values_of_rows(value: Any) -> np.ndarray | list[np.ndarray] | list[str]:
    """A column. Raises ValueError for what is none."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, list):
        raise ValueError(f"one value per row is a list, got {type(value).__name__}")
    kinds = set(map(type, value))
    if kinds == {str}:
        return value
    if kinds == {np.ndarray}:
        return value
    if kinds == {list}:
        inner = set(map(type, itertools.chain.from_iterable(value)))
        if inner == {list}:
            return [_block(row) for row in value]
        whole = float in inner or type(None) in inner
        return [_numbers(row, np.dtype(np.float64) if whole else None) for row in value]
    return _numbers(value)


def integers(value: Any) -> np.ndarray:
    """int64 [n]"""
    return _vector(value, "iu", "whole numbers").astype(np.int64, copy=False)


def floats(value: Any) -> np.ndarray:
    """float [n], as wide as it came"""
    array = _vector(value, "iufV", "numbers")
    return array.astype(np.float64) if array.dtype.kind in "iu" else array


def tokens(value: Any) -> np.ndarray:
    """int32 [n]"""
    array = integers(value)
    if array.size and (array.min() < 0 or array.max() > _TOKENS.max):
        raise ValueError(f"token ids are from 0 to {_TOKENS.max}, got {array.min()} to {array.max()}")
    return array.astype(np.int32)


def _vector(value: Any, kinds: str, what: str) -> np.ndarray:
    array = value if isinstance(value, np.ndarray) else _numbers(value)
    if array.ndim != 1 or (array.dtype.kind not in kinds and array.size):
        raise ValueError(f"a list of {what}, got {array.dtype} of shape {array.shape}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{array.max()} has no place in 64 bits with a sign")
    return array


def _numbers(value: Any, dtype: np.dtype | None = None) -> np.ndarray:
    """[n] of a list of plain numbers, or of booleans."""
    if not isinstance(value, list):
        raise ValueError(f"a list of numbers, got {type(value).__name__}")
    kinds = set(map(type, value))
    if kinds == {bool}:
        return np.array(value, np.bool_)
    if not kinds <= _NUMBERS:
        raise ValueError(f"a list of numbers, got {', '.join(sorted(kind.__name__ for kind in kinds))} in it")
    dtype = dtype or np.dtype(np.float64 if float in kinds or type(None) in kinds else np.int64)
    try:
        array = np.array([np.nan if item is None else item for item in value], dtype)
    except OverflowError:
        raise ValueError("a whole number has no place in 64 bits") from None
    if dtype.kind == "f" and np.isinf(array).any():
        raise ValueError("a number has no place in 64 bits")
    return array


def _block(rows: list[Any]) -> np.ndarray:
    """[L, k] of a list of lists of the same length."""
    arrays = [_numbers(row) for row in rows]
    if len({(len(array), array.dtype) for array in arrays}) > 1:
        raise ValueError("the lists within a row have different lengths or types")
    return np.stack(arrays) if arrays else np.zeros(0, np.int64)
