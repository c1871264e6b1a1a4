"""What a person sees of a dock: the statistics of its pairs added up, and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MIB = 1 << 20


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


def as_text(address: str, stats: Mapping[str, Any]) -> str:
    """`stats` of one pair, or of several added up, for a person."""
    lines = [
        f"dock {address}: {_mib(stats['used_bytes'])} of {_mib(stats['arena_bytes'])} MiB used "
        f"({_mib(stats['payload_bytes'])} payload), {stats['claims']} claims open, "
        f"{stats['leases_expired']} leases ran out, back-pressure {stats['back_pressure_s']:.1f} s, "
        f"dropped: {_counts(stats['drops'])}"
    ]
    for name, part in stats["partitions"].items():
        lines.append(f"  {name}: {part['rows']} rows in {part['groups']} groups{', sealed' if part['sealed'] else ''}")
        width = max(map(len, part["tasks"]), default=0)
        lines += [f"    {task:<{width}}  {_counts(states)}" for task, states in part["tasks"].items()]
    lines += [
        f"  waiting: {w['worker']!r} for {w['at_least']} {w['unit']} of {w['task']} in {w['partition']!r}"
        for w in stats["waiting"]
    ]
    return "\n".join(lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


def _counts(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in numbers.items()) or "none"
