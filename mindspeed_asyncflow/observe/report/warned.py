"""Warnings and errors of all processes of a run, from its log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOST = 200
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.\d+ (\S+)\[\d+\] (WARNING|ERROR|CRITICAL) \S+: (.*)")


@dataclass(slots=True)
class Warned:
    """The same words of one process are one; `times`: how often. `first`: when, on the clock of its host."""

    first: str
    process: str
    level: str
    text: str
    times: int = 1


def read_warnings(path: Path) -> list[Warned]:
    """In order of their first time, at most `MOST` and one that says how many more there are."""
    found: dict[tuple[str, str, str], Warned] = {}
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if match := _LINE.match(line):
                    first, process, level, text = match.groups()
                    key = (process, level, re.sub(r"\d+(\.\d+)?", "#", text))  # the same but for its figures
                    if key in found:
                        found[key].times += 1
                    else:
                        found[key] = Warned(first, process, level.lower(), text)
    warnings = list(found.values())
    rest = len(warnings) - MOST
    return warnings if rest <= 0 else [*warnings[:MOST], Warned("", "", "", f"{rest} more are in log.txt")]
