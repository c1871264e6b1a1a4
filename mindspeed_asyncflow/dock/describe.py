"""What a person sees of a dock: the statistics of its pairs, added up or as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MIB = 1 << 20
_HEAD = (
    "task",
    "waiting",
    "ready",
    "claimed",
    "done",
    "groups",
    "claims",
    "rows",
    "waited s/claim",
    "longest wait s",
    "again",
)
_RATES = ("claims/s", "rows/s")


def add_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One dict of the same form: numbers are added (`longest_*`: the largest), lists joined, flags hold if all do."""
    total: dict[str, Any] = {}
    for key in dict.fromkeys(k for part in parts for k in part):
        values = [part[key] for part in parts if key in part]
        first = values[0]
        if isinstance(first, Mapping):
            total[key] = add_up(values)
        elif isinstance(first, bool):
            total[key] = all(values)
        elif isinstance(first, (int, float)):
            total[key] = max(values) if key.startswith("longest") else sum(values)
        elif isinstance(first, list):
            total[key] = [item for value in values for item in value]
        else:
            total[key] = first
    return total


def waiting_rows(stats: Mapping[str, Any]) -> dict[str, int]:
    """Rows that are ready for a task and held by nobody."""
    tasks = stats["partitions"].get("train", {"tasks": {}})["tasks"]
    return {task: int(states["ready"]) for task, states in tasks.items() if task in ("rollout", "reward", "train")}


def as_text(
    address: str, stats: Mapping[str, Any], earlier: Mapping[str, Any] | None = None, seconds: float = 0.0
) -> str:
    """Statistics of one pair for a person; `earlier`, `seconds` before, turns counts of claims into rates."""
    lines = [
        f"pair {stats['pair']} of {stats['pairs']} at {address}: {_mib(stats['used_bytes'])} of "
        f"{_mib(stats['arena_bytes'])} MiB used ({_mib(stats['payload_bytes'])} payload, "
        f"{_mib(stats['reserved_bytes'])} more reserved), "
        f"{stats['claims']} claims open, {stats['peers']['steals']} served by other pairs, "
        f"{stats['leases_expired']} leases ran out, back-pressure {stats['back_pressure_s']:.1f} s, "
        f"dropped: {_counts(stats['drops'])}{', frozen' if stats['frozen'] else ''}"
    ]
    for name, part in stats["partitions"].items():
        lines.append(f"  {name}: {part['rows']} rows in {part['groups']} groups{', sealed' if part['sealed'] else ''}")
        head = (*_HEAD[:6], *(_RATES if earlier is not None else _HEAD[6:8]), *_HEAD[8:])
        rows = [_task_row(task, states, stats, earlier, seconds) for task, states in part["tasks"].items()]
        lines += ["    " + line for line in _table([head, *rows])]
    lines += [
        f"  {w['worker']!r} has waited {w['waited_s']:.1f} s for {w['at_least']} {w['unit']} of {w['task']} in "
        f"{w['partition']!r}"
        for w in stats["waiting"]
    ]
    lines += [
        f"  a {w['verb'].lower()} has waited {w['waited_s']:.1f} s for {w['for']}" for w in stats["waiting_for_room"]
    ]
    return "\n".join(lines)


def _task_row(
    task: str, states: Mapping[str, int], stats: Mapping[str, Any], earlier: Mapping[str, Any] | None, seconds: float
) -> tuple[str, ...]:
    count = stats["tasks"].get(task, {})
    claims, rows = count.get("claims_granted", 0), count.get("rows_granted", 0)
    moved: tuple[str, str] = (str(claims), str(rows))
    if earlier is not None:
        before = earlier["tasks"].get(task, {})
        moved = (
            f"{(claims - before.get('claims_granted', 0)) / max(seconds, 1e-9):.1f}",
            f"{(rows - before.get('rows_granted', 0)) / max(seconds, 1e-9):.1f}",
        )
    waited = count.get("wait_s", 0.0) / claims if claims else 0.0  # of all who asked, also those who went with nothing
    state = [str(states[name]) for name in ("waiting", "ready", "claimed", "done", "whole_groups")]
    waits = (f"{waited:.3f}", f"{count.get('longest_wait_s', 0.0):.3f}", str(count.get("rows_redelivered", 0)))
    return (task, *state, *moved, *waits)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


def _counts(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in numbers.items()) or "none"
