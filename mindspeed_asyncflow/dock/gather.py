"""Values and claims cut up over the pairs of a dock and put together again: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock import arguments
from mindspeed_asyncflow.dock.columns import Schema
from mindspeed_asyncflow.dock.kinds import as_array
from mindspeed_asyncflow.dock.pair import Claim
from mindspeed_asyncflow.dock.ragged import Ragged
from mindspeed_asyncflow.errors import DockError


def cuttable(schema: Schema, values: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a put or write as `take` and `weigh` want them: Ragged, arrays and lists."""
    out: dict[str, Any] = {}
    for name, column in values.items():
        if isinstance(column, (str, bytes)) or column is None:
            raise DockError(f"column {name!r} needs a sequence of rows, got {type(column).__name__}")
        if isinstance(column, (Ragged, np.ndarray, list)):
            out[name] = column
        else:
            out[name] = as_array(schema.column(name), column) if hasattr(column, "__array__") else list(column)
    return out


def take(values: Any, index: np.ndarray) -> Any:
    """The entries `index` of a column's values."""
    if isinstance(values, Ragged):
        return values.take(index)
    if isinstance(values, list):
        return [values[i] for i in index.tolist()]
    return values[index]


def check_lengths(schema: Schema, values: Mapping[str, Any], rows: int, groups: int) -> None:
    """Raises DockError unless every column has a value for each row, or, if it is shared, for each group."""
    for name, column in values.items():
        expected = groups if schema.column(name).shared else rows
        if len(column) != expected:
            raise DockError(f"column {name!r} came with {len(column)} rows, expected {expected}")


def merge_values(parts: Sequence[Any], order: np.ndarray) -> Any:
    """One column of several parts; entry i of the result is entry order[i] of the parts joined."""
    first = parts[0]
    if isinstance(first, Ragged):
        lengths = np.concatenate([part.lengths for part in parts])
        values = np.concatenate([part.stacked for part in parts])
        return Ragged.from_flat(values, np.concatenate(([0], np.cumsum(lengths)))).take(order)
    if isinstance(first, list):
        joined = [entry for part in parts for entry in part]
        return [joined[i] for i in order.tolist()]
    return np.concatenate(parts)[order]


def merge_columns(parts: Sequence[tuple[dict[str, Any], np.ndarray]], columns: Sequence[str]) -> dict[str, Any]:
    """Columns read from several pairs; with each part come the positions of its rows in the whole."""
    order = np.argsort(np.concatenate([index for _, index in parts]), kind="stable")
    return {name: merge_values([part[name] for part, _ in parts], order) for name in columns}


def weigh(schema: Schema, values: Mapping[str, Any], counts: np.ndarray) -> np.ndarray:
    """Bytes of each group, int64 [groups], near enough to choose a home."""
    ends = np.cumsum(counts)
    total = np.zeros(len(counts), np.int64)
    for name, column in values.items():
        nbytes = _row_bytes(column)
        if schema.column(name).shared:
            total += nbytes
        else:
            below = np.concatenate(([0], np.cumsum(nbytes)))
            total += below[ends] - below[ends - counts]
    return total


def _row_bytes(values: Any) -> np.ndarray:
    if isinstance(values, Ragged):
        return values.counts * values.values.dtype.itemsize
    if isinstance(values, np.ndarray):
        return np.full(len(values), values.nbytes // max(len(values), 1), np.int64)
    return np.array([getattr(row, "nbytes", 0) or _length(row) for row in values], np.int64)


def row_count(values: Mapping[str, Any]) -> int:
    """Rows of a put without groups."""
    return len(next(iter(values.values()))) if values else 0


def _length(row: Any) -> int:
    return len(row) if hasattr(row, "__len__") else 1


def unit_count(claim: Claim, unit: str) -> int:
    """Rows or groups of a claim."""
    return len(claim.rows) if unit == "rows" else len(np.unique(claim.group_ids))


def join_claims(parts: Sequence[Claim], claim_id: int, wanted: Sequence[int] | None) -> Claim:
    """Grants of several pairs under one claim id. Groups named by `wanted` come in that order."""
    full = [part for part in parts if len(part.rows)] or list(parts[:1])
    group_ids = np.concatenate([part.group_ids for part in full])
    order = np.arange(len(group_ids))
    if wanted is not None:
        place = {group: i for i, group in enumerate(dict.fromkeys(wanted))}
        order = np.argsort(np.array([place[g] for g in group_ids.tolist()], np.int64), kind="stable")
    names = ("rows", "group_ids", "members", "version_min", "version_max", "tokens")
    arrays = {name: np.concatenate([getattr(part, name) for part in full])[order] for name in names}
    brought = [part.values for part in full if part.values is not None]
    values = None
    if len(brought) == len(full):  # those of another pair come without them: then all are read afterwards
        values = {name: merge_values([some[name] for some in brought], order) for name in brought[0]}
    return Claim(
        claim_id=claim_id, **arrays, dropped=[drop for part in parts for drop in part.dropped],
        sealed=not len(group_ids) and parts[-1].sealed, values=values, ready=parts[-1].ready,
    )  # fmt: skip


def check_groups(
    group_ids: Sequence[int] | np.ndarray, sizes: Sequence[int] | np.ndarray | None,
    counts: Sequence[int] | np.ndarray | None, members: Sequence[int] | np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Ids, sizes, counts and members of a put as arrays, with the defaults of `PairClient.put`.

    Raises DockError unless they fit together.
    """
    ids = arguments.numbers("group_ids", group_ids)
    count = np.ones(len(ids), np.int64) if counts is None else arguments.numbers("counts", counts)
    size = count if sizes is None else arguments.numbers("sizes", sizes)
    if not len(ids) == len(size) == len(count) or not len(ids) or (count < 1).any():
        raise DockError(
            f"a put has at least one group, and for each a size and a count of one or more; got {len(ids)} ids, "
            f"{len(size)} sizes, {len(count)} counts"
        )
    ends = np.cumsum(count)
    total = int(ends[-1])
    member = np.arange(total) - np.repeat(ends - count, count) if members is None else members
    if len(member) != total:
        raise DockError(f"a put of {total} rows came with {len(member)} member numbers")
    return ids, size, count, arguments.numbers("members", member, "int32")
