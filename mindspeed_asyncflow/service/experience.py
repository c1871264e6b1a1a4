"""Columns on their way out of the dock and into it, in the forms of the service interface (`verbs.Column`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.data.tokenizers import decode_answers
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.service.verbs import Column, Experience
from mindspeed_asyncflow.workflow.dock_port import ThreadDock

TEXTS = ("truth", "fields")  # UTF-8 bytes in the dock
DECODED = {"prompt": "prompt_ids", "response": "response_ids"}  # tokens as text, made of what is in the dock
NOTHING = Experience(0, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32), {})
COLUMNS = {column.name: column for column in GRPO_COLUMNS if column.name != "asked"}


def columns_of(
    names: Sequence[str], session: Any, dock: ThreadDock | None = None
) -> Callable[[np.ndarray], Awaitable[dict[str, Column]]]:
    """Reads these columns of rows of `dock`, by default that of the run. Raises `ServiceError` for one that does not
    exist."""
    place = dock or session.dock
    for name in names:
        if name not in COLUMNS and name not in DECODED:
            known = ", ".join([*COLUMNS, *DECODED])
            raise ServiceError(422, "columns", f"there is no column {name!r:.60}; there are {known}")

    async def read(rows: np.ndarray) -> dict[str, Column]:
        wanted = list(dict.fromkeys(DECODED.get(name, name) for name in names))
        found = await place.read(rows, wanted) if wanted else {}
        return {name: _value(name, found, session) for name in names}

    return read


def _value(name: str, found: Mapping[str, Any], session: Any) -> Column:
    if name in DECODED:
        tokens = [np.array(ids) for ids in found[DECODED[name]]]
        return decode_answers(session.tokenizer, tokens, session.stop_ids if name == "response" else ())
    if name in TEXTS:
        return [bytes(text).decode("utf-8") for text in found[name]]
    if COLUMNS[name].kind == "scalar":
        return np.array(found[name])
    return [np.array(row) for row in found[name]]  # of one's own: the dock's memory is used anew


def floats(name: str, column: Any, rows: int) -> np.ndarray:
    """float64 [rows]. Raises `ServiceError`."""
    try:
        values = np.asarray(column, np.float64)
    except (ValueError, TypeError) as error:
        raise ServiceError(422, name, f"{name} are numbers, one per row: {error}") from None
    if values.shape != (rows,):
        raise ServiceError(422, name, f"{name} has the shape {values.shape}, and {rows} rows are named")
    return values


def cast(name: str, column: Any, rows: int) -> Any:
    """What the dock takes for the column `name` of so many rows. Raises `ServiceError` where it does not fit."""
    spec = COLUMNS.get(name)
    if spec is None or spec.shared:
        known = ", ".join(n for n, c in COLUMNS.items() if not c.shared)
        raise ServiceError(422, "columns", f"{name!r:.60} is no column that can be written; these are: {known}")
    if np.ndim(column) == 0 if isinstance(column, np.ndarray) else isinstance(column, str):
        raise ServiceError(422, "columns", f"{name} has one value per row, in a list or an array")
    if len(column) != rows:
        raise ServiceError(422, "columns", f"{name} has {len(column)} values, and {rows} rows are named")
    depth = len(spec.shape) + (1 if spec.kind == "ragged" else 0)
    each = [_array(name, value, spec.dtype, depth, spec.shape) for value in column]
    return np.array(each, spec.dtype) if spec.kind == "scalar" else each


def _array(name: str, value: Any, dtype: str, depth: int, inner: tuple[int, ...]) -> np.ndarray:
    target = np.dtype(dtype)
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise ServiceError(422, "columns", f"{name}: {error}") from None
    if not found.size:
        found = found.astype(target)
        found = found.reshape(0, *inner) if depth else found
    kinds = "iub" if target.kind in "iu" else "iubf"
    if found.dtype.kind not in kinds or found.ndim != depth or (inner and found.shape[1:] != inner):
        dims = "".join(f", {n}" for n in inner)
        what = f"[L{dims}] of {dtype}" if depth else f"one {dtype} per row"
        raise ServiceError(422, "columns", f"{name} is {what}; a row has {found.dtype} of the shape {found.shape}")
    if target.kind in "iu" and found.size:
        limits = np.iinfo(target)
        if not limits.min <= int(found.min()) <= int(found.max()) <= limits.max:
            raise ServiceError(422, "columns", f"{name} has a value that {dtype} does not hold")
    return found.astype(target)
