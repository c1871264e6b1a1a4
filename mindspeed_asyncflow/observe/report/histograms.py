"""How many trained answers had which lag and which length, in the whole run and at its two ends."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

PARTS = ("whole run", "first quarter", "last quarter")  # of the steps
MOST_BINS = 512
Counts = dict[str, dict[int, int]]  # part -> value -> answers
Bins = dict[str, Any]  # {"width": w, "parts": {part: [[smallest value of the bin, answers], ...]}}


def read_lags(ledger: Path, summary: Mapping[str, Any], missing: list[str]) -> Counts:
    """Lag in versions of the oldest token: from the ledger, else of the whole run from its summary."""
    if ledger.is_file():
        query = (
            "SELECT step, step - oldest, COUNT(*) FROM trained JOIN note USING (seq) WHERE undone IS NULL GROUP BY 1, 2"
        )
        try:
            with contextlib.closing(sqlite3.connect(f"file:{_quoted(ledger)}?mode=ro", uri=True, timeout=10)) as db:
                return _parts(db.execute(query).fetchall())
        except sqlite3.Error as error:
            missing.append(f"ledger.sqlite: lags by part of the run ({error})")
    histogram = {int(lag): int(count) for lag, count in (summary.get("lag_histogram") or {}).items() if count}
    return {PARTS[0]: histogram} if histogram else {}


def read_lengths(events: Path, missing: list[str]) -> Counts:
    """Tokens of trained answers, from the rows that `observe.events` records."""
    rows: list[tuple[int, int, int]] = []
    for path in sorted(events.glob("step_*.npz")) if events.exists() else []:
        step = int(re.findall(r"step_(\d+)", path.name)[0])
        try:
            with np.load(path) as file:  # reads the one array
                found, counts = np.unique(file["length.response_ids"], return_counts=True)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:  # torn
            missing.append(f"events/{path.name}: lengths of its answers ({error})")
            continue
        rows += [(step, int(value), int(count)) for value, count in zip(found, counts)]
    if not rows:
        missing.append("events/: lengths of trained answers (observe.events)")
    return _parts(rows)


def binned(counts: Counts) -> Bins:
    """Bins of a power of two, so that those of several runs can be joined."""
    width, largest = 1, max((value for part in counts.values() for value in part), default=0)
    while largest // width >= MOST_BINS:
        width *= 2
    parts = {}
    for part, values in counts.items():
        bins: Counter[int] = Counter()
        for value, count in values.items():
            bins[value // width * width] += count
        parts[part] = [list(item) for item in sorted(bins.items())]
    return {"width": width, "parts": parts}


def _parts(rows: Iterable[tuple[int, int, int]]) -> Counts:
    """`rows`: (step, value, answers)."""
    rows = list(rows)
    if not rows:
        return {}
    steps = sorted({step for step, _, _ in rows})
    quarter = max(1, len(steps) // 4)
    chosen = {PARTS[0]: set(steps)}
    if len(steps) >= 4:
        chosen |= {PARTS[1]: set(steps[:quarter]), PARTS[2]: set(steps[-quarter:])}
    result: Counts = {}
    for part, inside in chosen.items():
        counts: Counter[int] = Counter()
        for step, value, count in rows:
            if step in inside:
                counts[value] += count
        result[part] = dict(sorted(counts.items()))
    return result


def _quoted(path: Path) -> str:
    return path.absolute().as_uri().removeprefix("file:")
