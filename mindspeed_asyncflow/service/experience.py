"""Columns on their way out of the dock and into it, in the forms of the service interface (`verbs.Column`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.data.tokenizers import decode_answers
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.service.verbs import Column

TEXTS = ("truth", "fields")  # UTF-8 bytes in the dock
DECODED = {"prompt": "prompt_ids", "response": "response_ids"}  # tokens as text, made of what is in the dock
COLUMNS = {column.name: column for column in GRPO_COLUMNS if column.name != "asked"}


def columns_of(names: Sequence[str], session: Any) -> Callable[[np.ndarray], Awaitable[dict[str, Column]]]:
    """Reads these columns of rows of the run. Raises `ServiceError` for one that does not exist."""
    for name in names:
        if name not in COLUMNS and name not in DECODED:
            known = ", ".join([*COLUMNS, *DECODED])
            raise ServiceError(422, "columns", f"there is no column {name!r:.60}; there are {known}")

    async def read(rows: np.ndarray) -> dict[str, Column]:
        wanted = list(dict.fromkeys(DECODED.get(name, name) for name in names))
        found = await session.dock.read(rows, wanted) if wanted else {}
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
