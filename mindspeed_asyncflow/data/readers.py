"""Rows of a file, whatever its format, each with the place where it stands."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.errors import DataError

Row = tuple[str, dict[str, Any]]  # ("file:line" or "file, row n", its columns)

_BATCH = 1024  # Parquet rows in memory as Python objects


def read_rows(file: Path) -> Iterator[Row]:
    """All rows of `file`, in order; its ending tells the format.

    Raises `DataError` with file and line for what is broken: no UTF-8, no JSON, cells without a column.
    """
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(f"{file}: data files end in {', '.join(ENDINGS)}")
    try:
        yield from reader(file)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8: {error}") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _json_lines(file: Path) -> Iterator[Row]:
    # Only "\n" ends a line: splitlines() would also cut at U+2028, which JSON allows inside a string.
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(line, f"{file}:{number}")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} stands twice in one object")
    return found


def _object(text: str, where: str) -> Row:
    try:
        row = json.loads(text, parse_constant=_no_number, object_pairs_hook=_names)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    return where, _checked(row, where)


def _checked(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be an object with named columns, this is {type(row).__name__}")
    return row


def _json(file: Path) -> Iterator[Row]:
    """A list of objects, {"data": list}, or {column: list of values}; also JSON lines under that ending."""
    text = file.read_text(encoding="utf-8-sig")
    if not text.strip():
        return
    try:
        whole = json.loads(text, parse_constant=_no_number, object_pairs_hook=_names)
    except RecursionError as error:
        raise DataError(f"{file}: not JSON ({error})") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object after another
            yield from _json_lines(file)
            return
        raise DataError(f"{file}:{error.lineno}: not JSON ({error.msg} at column {error.colno})") from error
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({error})") from error
    if isinstance(whole, dict) and _is_table(whole.get("data")):
        whole = whole["data"]
    if isinstance(whole, dict):
        whole = _of_columns(whole, file)
    if not isinstance(whole, list):
        raise DataError(f"{file}: must be a list of rows, {{data: [...]}} or one list for each column")
    for number, row in enumerate(whole, start=1):
        yield _where(file, number), _checked(row, _where(file, number))


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _of_columns(columns: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    if not all(isinstance(values, list) for values in columns.values()):
        return [columns]  # one row
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{file}: its columns differ in length: {lengths}")
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def _where(file: Path, number: int) -> str:
    return f"{file}, row {number}"


def _csv(file: Path) -> Iterator[Row]:
    """The first line names the columns; an empty cell is a null."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with file.open(encoding="utf-8-sig", newline="") as text:
        rows = csv.reader(text, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            names = next(rows, [])
            if len(set(names)) < len(names):
                raise DataError(f"{file}:1: a column name stands twice: {names}")
            before = rows.line_num
            for cells in rows:
                where, before = f"{file}:{before + 1}", rows.line_num
                if cells and len(cells) != len(names):
                    raise DataError(f"{where}: {len(cells)} cells for the {len(names)} columns {', '.join(names)}")
                if cells:
                    yield where, {name: cell if cell else None for name, cell in zip(names, cells)}
        except csv.Error as error:
            raise DataError(f"{file}:{rows.line_num}: not CSV ({error})") from error


def _parquet(file: Path) -> Iterator[Row]:
    try:
        library = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(
            f"{file}: Parquet needs a library that is missing ({error}): pip install pyarrow, or convert to JSON lines"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield _where(file, number), row
    except library.ArrowException as error:
        raise DataError(f"{file}: not Parquet ({error})") from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
ENDINGS = tuple(_READERS)
