"""Recorded signatures of the libraries, and whether a use of ours fits one of them."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path

from tests.ascend.contract.calls import Use

FOLDER = Path(__file__).parent / "records"


@dataclass(frozen=True, slots=True)
class Release:
    """What one release of a library offers of what we use."""

    library: str
    version: str
    date: str  # of the release
    commit: str  # of its source; of a wheel that names none, its SHA-256
    source: str  # where it was read
    symbols: dict[str, list[str] | str | None]  # see `sources.Record`
    abstract: dict[str, list[str]]  # of classes that ours derive from: methods to define

    @property
    def name(self) -> str:
        return f"{self.library} {self.version}"


def load(folder: Path = FOLDER) -> list[Release]:
    return [Release(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]


def problem(use: Use, release: Release) -> str:
    """What is wrong with `use` in `release`, naming file and line; "" where it fits."""
    said = _problem(use, release)
    return f"{use.file}:{use.line}: {use.symbol} ({release.name}): {said}" if said else ""


def _problem(use: Use, release: Release) -> str:
    if use.symbol not in release.symbols:
        return "no record of it; run scripts/refresh_contracts.py"
    record = release.symbols[use.symbol]
    if use.override:
        return "" if not isinstance(record, list) else _override(use.override, record[0])
    if record is None:
        return "there is no such symbol"
    if use.methods is not None:
        missing = sorted(set(release.abstract.get(use.symbol, [])) - set(use.methods))
        return f"our subclass does not define {', '.join(missing)}" if missing else ""
    if use.positional is None or record == "untyped":
        return ""
    if isinstance(record, str):
        return f"is called, but is a {record}"
    said = [_call(use, parameters) for parameters in record]
    return "" if "" in said else said[0]


def _arguments(parameters: str) -> ast.arguments:
    tree = ast.parse(f"def f{parameters}: ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree.args


def _call(use: Use, parameters: str) -> str:
    """Whether the call binds to `parameters`."""
    a = _arguments(parameters)
    positional = [arg.arg for arg in [*a.posonlyargs, *a.args]]
    required = positional[: len(positional) - len(a.defaults)]
    required += [arg.arg for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
    by_name = {arg.arg for arg in [*a.args, *a.kwonlyargs]}
    assert use.positional is not None
    if use.positional > len(positional) and a.vararg is None:
        return f"{use.positional} positional arguments are passed, {parameters} takes {len(positional)}"
    strange = [name for name in use.keywords if name not in by_name and a.kwarg is None]
    if strange:
        return f"there is no parameter {', '.join(strange)} in {parameters}"
    filled = positional[: use.positional]
    twice = sorted(set(filled) & set(use.keywords))
    if twice:
        return f"{', '.join(twice)} is passed twice to {parameters}"
    missing = [name for name in required if name not in filled and name not in use.keywords]
    return f"{', '.join(missing)} of {parameters} is not passed" if missing and not use.more else ""


def _override(ours: str, theirs: str) -> str:
    """Whether our method takes every call that may be made to the one it replaces."""
    a, b = _arguments(ours), _arguments(theirs)
    mine, base = [arg.arg for arg in [*a.posonlyargs, *a.args]], [arg.arg for arg in [*b.posonlyargs, *b.args]]
    if a.vararg is None and mine[: len(base)] != base:
        return f"ours takes {ours}, it is called as {theirs}"
    added = mine[len(base) : len(mine) - len(a.defaults)]
    return f"ours wants {', '.join(added)}, it is called as {theirs}" if added and b.vararg is None else ""
