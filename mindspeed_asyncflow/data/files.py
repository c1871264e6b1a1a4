"""Problems from files: JSON lines, JSON, CSV and Parquet."""

from __future__ import annotations

import base64
import datetime
import decimal
import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.data.problem import Message, Problem
from mindspeed_asyncflow.data.readers import ENDINGS, Row, read_rows
from mindspeed_asyncflow.errors import DataError

FIELDS_LIMIT = 65536  # characters of one row's other columns as JSON: they travel with every answer
COLUMNS = ("prompt", "answer", "id", "system", "fields")
RESERVED = ("prompt", "id", "source")  # what every prompt's fields have from this program
_NAMED = 3  # places named in a note


class Unusable(Exception):
    """A row that is left out and counted."""


class Files:
    """Rows with `prompt` (text, or a list of messages) and `answer`, and maybe `id` and `system`.

    `columns` names the columns that hold these, where they have other names; "a.b" is b inside a; "" is none. The
    other columns come along as `Problem.fields`: all of them, or those that columns["fields"] lists with commas.

    Reward 1 if the answer, without surrounding white space, equals the text exactly; else 0.
    """

    def __init__(self, place: str, columns: dict[str, str] | None = None) -> None:
        self.name = f"file:{place}"
        self.place = place
        unknown = sorted(set(columns or {}) - set(COLUMNS))
        if unknown:
            raise DataError(f"data.columns has {', '.join(unknown)}; it may name {', '.join(COLUMNS)}")
        self.columns = {"prompt": "prompt", "answer": "answer", "id": "id", "system": "system"} | (columns or {})
        self.notes: list[str] = []

    def files(self) -> list[Path]:
        """The files that the place stands for, sorted by path. Raises `DataError` if there is none."""
        place = Path(self.place)
        if place.is_dir():
            inside = [f for f in place.rglob("*") if f.suffix.lower() in ENDINGS and f.is_file()]
            found = [f for f in inside if not any(part.startswith(".") for part in f.relative_to(place).parts)]
        else:  # a file's own name may have what is a pattern elsewhere
            found = [place] if place.is_file() else [Path(f) for f in glob.glob(self.place, recursive=True)]
            found = [f for f in found if f.is_file()]
        if not found:
            held = f"holds no file that ends in {', '.join(ENDINGS)}" if place.is_dir() else "there is no such file"
            raise DataError(f"data.task {self.name}: {held}")
        return sorted(found)

    def problems(self, size: int, seed: int) -> list[Problem]:
        """The first `size` usable rows, in the order of files and rows; `seed` has no part in it.

        Rows without prompt or answer are left out; `notes` then counts and names them. Raises `DataError` for
        what is broken, for ids that stand twice, and where no row is usable.
        """
        found: list[Problem] = []
        unusable: list[str] = []
        places: dict[str, str] = {}
        self.notes, more, last = [], False, ""
        absent = set(self._listed() or ())
        for where, row in self._rows():
            if len(found) == size:
                more = True
                break
            try:
                problem = self._problem(where, row)
            except Unusable as reason:
                unusable.append(f"{where}: {reason}")
                continue
            assert problem.id is not None
            if problem.id in places:
                raise DataError(f"{where}: id {problem.id!r} stands at {places[problem.id]} already")
            places[problem.id] = where
            found.append(problem)
            last = ", ".join(sorted(row))
            absent -= {name for name in absent if _look_up(row, name) is not None or name in row}
        if not found:
            said = f"no usable row; {unusable[0]}" if unusable else "holds no rows"
            raise DataError(f"data.task {self.name}: {said}")
        if absent:
            names = ", ".join(sorted(absent))
            raise DataError(
                f"data.task {self.name}: data.columns.fields lists {names}, which no row has; the last has {last}"
            )
        if unusable:
            rest = f" and {len(unusable) - _NAMED} more" if len(unusable) > _NAMED else ""
            count = f"{len(unusable)} unusable row{'s' * (len(unusable) > 1)} left out"
            self.notes.append(f"{self.name}: {count} ({'; '.join(unusable[:_NAMED])}{rest})")
        if more:
            self.notes.append(f"{self.name}: has more than the {size} rows that data.size takes")
        return found

    def _rows(self) -> Iterator[Row]:
        for file in self.files():
            yield from read_rows(file)

    def _problem(self, where: str, row: dict[str, Any]) -> Problem:
        prompt = _prompt(self._needed(row, "prompt"), self.columns["prompt"])
        truth = as_text(self._needed(row, "answer")) if self.columns["answer"] else ""
        system = _look_up(row, self.columns["system"])
        if isinstance(system, str) and system:
            prompt = _with_system(prompt, system)
        given = _look_up(row, self.columns["id"])
        problem = Problem(prompt, truth, where if given is None else as_text(given), self._others(where, row))
        try:
            as_text([problem.prompt, truth, problem.id, problem.fields]).encode()
        except UnicodeEncodeError:
            raise Unusable("holds half of a surrogate pair, which is no text") from None
        return problem

    def _needed(self, row: dict[str, Any], what: str) -> Any:
        name = self.columns[what]
        value = _look_up(row, name)
        if value is None:
            top = name.partition(".")[0]
            here = name in row or top in row
            raise Unusable(f"{name} is null" if here else f"no {name} among its columns {', '.join(sorted(row))}")
        return value

    def _listed(self) -> list[str] | None:
        """Columns that `columns` wants along; None: all others."""
        wanted = self.columns.get("fields")
        return None if wanted is None else [name.strip() for name in wanted.split(",") if name.strip()]

    def _others(self, where: str, row: dict[str, Any]) -> dict[str, Any]:
        names = self._listed()
        if names is None:
            used = {self.columns[what] for what in ("prompt", "answer", "id", "system")}
            names = [name for name in row if name not in used]
        found = {}
        for name in names:
            try:
                value = json.loads(json.dumps(_look_up(row, name), default=_plain))
            except (TypeError, ValueError) as error:
                raise DataError(f"{where}: column {name} cannot be written as JSON ({error})") from error
            found[f"{name}_" if name in RESERVED else name] = value
        sizes = {name: len(json.dumps(value, ensure_ascii=False)) for name, value in found.items()}
        if sum(sizes.values()) > FIELDS_LIMIT:
            largest = max(sizes, key=lambda name: sizes[name])
            raise DataError(
                f"{where}: its other columns are {sum(sizes.values())} characters, at most {FIELDS_LIMIT} go along "
                f"({largest} alone has {sizes[largest]}): list those that scorers need in data.columns.fields"
            )
        return found

    def score(self, text: str, truth: str, finished: bool) -> float:
        return float(finished and text.strip() == truth.strip())


def _look_up(row: dict[str, Any], name: str) -> Any:
    """The value called `name`: a column, or with dots a field inside columns, which may be JSON text."""
    if name in row or not name:
        return row.get(name)
    value: Any = row
    for part in name.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                return None
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def _prompt(value: Any, column: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = None
        if _is_conversation(parsed):  # a list stored as JSON text; any other text is a prompt as it stands
            value = parsed
    if isinstance(value, str):
        if not value:
            raise Unusable(f"{column} is empty")
        return value
    if _is_conversation(value):
        return tuple({key: text for key, text in message.items() if text is not None} for message in value)
    raise Unusable(f"{column} must be text or a list of messages with role and content")


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )


def _with_system(prompt: str | tuple[Message, ...], system: str) -> tuple[Message, ...]:
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    return messages if messages[0]["role"] == "system" else ({"role": "system", "content": system}, *messages)


def as_text(value: Any) -> str:
    """Text as it is, everything else as JSON: 4 is "4", true is "true", a list is "[1, 2]"."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """What JSON has no form for, and Parquet has."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no JSON form")
