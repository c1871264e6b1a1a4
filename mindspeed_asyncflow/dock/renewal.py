"""Cells that have a value when another one comes for them: a second result, or a renewal."""

from __future__ import annotations

import numpy as np

from mindspeed_asyncflow.dock.partition import Partition
from mindspeed_asyncflow.dock.store import Store, Values


def second_results(
    store: Store, part: Partition, slots: np.ndarray, values: Values, claimed: bool
) -> tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What a write of `values` into the rows `slots` meets; changes nothing.

    Returns why it is refused ("": it is not); by part, where not all rows take their new cell, which do (bool [rows]):
    the others have an equal value already; and by part the slots of cells that the new ones replace. `claimed`:
    whether the writer holds these rows.
    """
    refusal = "shared columns are written by the put of their group" if any(p.shared for p in values.parts) else ""
    before = part.rows.ready[slots]
    fresh: dict[str, np.ndarray] = {}
    replaced: dict[str, np.ndarray] = {}
    for i, cell in enumerate(values.parts):
        again = (before & store.schema.bit[cell.column]) != 0
        if not np.count_nonzero(again):
            continue
        if cell.renewable:
            if not (claimed or refusal):
                refusal = f"column {cell.column!r} is renewed by the holder of a claim on its rows: give the claim_id"
            replaced[cell.name] = slots[again]
            continue
        if not refusal and not store.equal(part, values, i, slots[again], again):
            refusal = f"column {cell.column!r} of {again.sum()} rows has a result already, and another one came"
        fresh[cell.name] = ~again
    return refusal, fresh, replaced
