"""What a table of another system's keys consists of, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_asyncflow.migration.foreign import Foreign

Change = Mapping[Any, Any] | Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Move:
    """A key of theirs that is one of ours."""

    theirs: str
    ours: str
    default: Any = None  # what their system takes where the file is silent; None: ours is left alone then
    change: Change | None = None  # their value to ours; a mapping lists all that have an equivalent


@dataclass(slots=True)
class Outcome:
    """Settings of ours, and what could not be carried over."""

    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)  # ours -> value, comment
    lost: list[tuple[str, str]] = field(default_factory=list)  # theirs with its value, why there is no equivalent
    undecided: list[tuple[str, str]] = field(default_factory=list)  # what must be decided by hand, and how
    unknown: list[str] = field(default_factory=list)  # keys that the table does not have

    def put(self, ours: str, value: Any, comment: str) -> None:
        self.settings[ours] = (value, comment)

    def value(self, ours: str, otherwise: Any) -> Any:
        return self.settings[ours][0] if ours in self.settings else otherwise


@dataclass(frozen=True, slots=True)
class System:
    """Another system's settings: how its files are known, and what its keys mean here."""

    name: str
    known_by: tuple[str, ...]  # keys of which one is enough
    moves: tuple[Move, ...]
    derive: Callable[[Foreign, Outcome], None]  # what depends on several keys
    lost: Mapping[str, str]  # key or section -> why it has no equivalent
    needless: tuple[str, ...]  # keys and sections that a run here does by itself, or that are about their machinery


def apply(system: System, file: Foreign) -> Outcome:
    """Run the table over the file. What is left of the file's keys is lost, needless or unknown; nothing is dropped."""
    out = Outcome()
    for move in system.moves:
        _move(system, move, file, out)
    system.derive(file, out)
    for ours, (value, comment) in out.settings.items():
        key = comment.removeprefix("from ")
        if key != comment and " " not in key and not file.has(key):
            out.put(ours, value, f"{system.name}'s default of {key}")
    for key, reference in file.unresolved.items():
        out.undecided.append((key, f"{reference} leads to nothing in this file: print the whole configuration first"))
    sections: dict[str, list[str]] = {}
    for key, value in file.rest():
        section, quiet = _section(key, system.lost), _section(key, system.needless)
        if quiet and len(quiet) >= len(section):
            continue
        if not section:
            out.unknown.append(f"{key}: {shown(value)}")
        elif value is not False and not (value == 1 and key.endswith("_size")):  # off, or not cut: nothing is lost
            sections.setdefault(section, []).append(f"{key}: {shown(value)}")
    for section, keys in sections.items():
        out.lost.append((keys[0] if len(keys) == 1 else f"{section}.* ({len(keys)} keys)", system.lost[section]))
    return out


def _move(system: System, move: Move, file: Foreign, out: Outcome) -> None:
    value = file.get(move.theirs)
    comment = f"from {move.theirs}"
    if value is None:
        if move.default is None:
            return
        value, comment = move.default, f"{system.name}'s default of {move.theirs}"
    if move.change is None:
        changed = value
    elif isinstance(move.change, Mapping):
        changed = move.change.get(value) if isinstance(value, str | int | float) else None
        if changed is None:
            out.lost.append((f"{move.theirs}: {shown(value)}", f"{move.ours} knows {choices(move.change)}"))
            return
    else:
        try:
            changed = move.change(value)
        except (TypeError, ValueError, ArithmeticError):
            out.undecided.append((f"{move.theirs}: {shown(value)}", f"not understood; set {move.ours} by hand"))
            return
    if changed is not None:
        out.put(move.ours, changed, comment)


def choices(change: Mapping[Any, Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in change.values()))


def shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _section(key: str, sections: Mapping[str, str] | tuple[str, ...]) -> str:
    """The longest of `sections` that is `key` or holds it; "" if none does."""
    parts = key.split(".")
    return next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sections), "")
