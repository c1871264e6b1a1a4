"""The spans of all processes as rows of bars over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.observe.report.curves import Curves
from mindspeed_asyncflow.observe.trace import read_events, sub_lane

MOST_BARS = 30_000
FIRST_STEPS = 3  # shown at first: these, in the middle of the run


@dataclass(frozen=True, slots=True)
class Lanes:
    """Times are microseconds from `begin_s` (epoch s)."""

    begin_s: float = 0.0
    rows: list[str] = field(default_factory=list)  # labels
    names: list[str] = field(default_factory=list)  # of spans, those that took longest first
    details: list[str] = field(default_factory=list)
    bars: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    """(row, index of name, start, length, depth of nesting, index of detail), by start"""
    marks: list[tuple[int, int]] = field(default_factory=list)  # (when, which step was done)
    window: tuple[int, int] = (0, 1)  # to show first


def read_lanes(folder: Path, curves: Curves, missing: list[str]) -> Lanes:
    spans = [e for e in read_events(folder) if e["kind"] == "X"] if folder.exists() else []
    if not spans:
        missing.append("trace/: no spans (observe.trace is off, or no process wrote any)")
        return Lanes()
    if len(spans) > MOST_BARS:
        longest = sorted((e["dur_us"] for e in spans), reverse=True)[MOST_BARS]
        missing.append(f"lanes: only the {MOST_BARS} longest of {len(spans)} spans are drawn; all are in trace/")
        spans = [e for e in spans if e["dur_us"] > longest]
    begin = spans[0]["start_us"]
    placed = _placed(spans)
    keys = sorted({key for key, _, _ in placed}, key=lambda key: (_counted(key[0]), _counted(key[1]), key[2]))
    rows = {key: i for i, key in enumerate(keys)}
    took: dict[str, int] = {}
    for e in spans:
        took[e["name"]] = took.get(e["name"], 0) + e["dur_us"]
    names = {name: i for i, name in enumerate(sorted(took, key=lambda name: -took[name]))}
    details: dict[str, int] = {}
    bars = []
    for key, depth, e in placed:
        detail = " ".join(f"{k}={v}" for k, v in e["args"].items())
        index = details.setdefault(detail, len(details))
        bars.append((rows[key], names[e["name"]], e["start_us"] - begin, e["dur_us"], depth, index))
    marks = [(int(t * 1e6) - begin, step) for step, t in zip(curves.steps, curves.times)]
    end = max(start + length for _, _, start, length, _, _ in bars)
    return Lanes(
        begin / 1e6, [_label(*key) for key in keys], list(names), list(details), bars, marks, _window(bars, marks, end)
    )


def _placed(spans: Sequence[dict[str, Any]]) -> list[tuple[tuple[str, str, int], int, dict[str, Any]]]:
    """((process, lane, row inside the lane), depth of nesting, span): spans that overlap without nesting get rows."""
    ends: dict[tuple[str, str], list[list[int]]] = {}
    placed = []
    for e in spans:
        levels = ends.setdefault((e["process"], e["lane"]), [])
        level = sub_lane(levels, e["start_us"], e["dur_us"])
        placed.append(((e["process"], e["lane"], level), len(levels[level]) - 1, e))
    return placed


def _counted(name: str) -> list[tuple[str, int]]:
    """Puts rollout2 before rollout10."""
    return [(word, int(digits or -1)) for word, digits in re.findall(r"(\D*)(\d*)", name)]


def _label(process: str, lane: str, level: int) -> str:
    words = lane if lane.startswith(process) else f"{process} · {lane}"
    return words if level == 0 else f"{words} ({level + 1})"


def _window(bars: Sequence[tuple[int, ...]], marks: Sequence[tuple[int, int]], end: int) -> tuple[int, int]:
    """The steps in the middle of the run, where spans are among them; else everything."""
    first = max(0, (len(marks) - FIRST_STEPS) // 2)
    chosen = [at for at, _ in marks[first : first + FIRST_STEPS + 1]]
    if len(chosen) >= 2 and chosen[-1] > chosen[0]:
        low, high = chosen[0], chosen[-1]
        if any(start < high and start + length > low for _, _, start, length, _, _ in bars):
            return low, high
    return 0, max(1, end)
