"""Problems from a file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.errors import DataError


class JsonLines:
    """One object per line with `prompt` (text, or a list of messages) and `answer`.

    Reward 1 if the answer, without surrounding white space, equals the text exactly; else 0. A byte order mark,
    CRLF line ends and blank lines are accepted.
    """

    def __init__(self, file: str) -> None:
        self.name = f"jsonl:{file}"
        self.file = Path(file)

    def problems(self, size: int, seed: int) -> list[Problem]:
        """The first `size` rows, in file order; `seed` has no part in it."""
        try:
            # Only "\n" ends a line: splitlines() would also cut at U+2028, which JSON allows inside a string.
            lines = self.file.read_text(encoding="utf-8-sig").split("\n")
        except FileNotFoundError as error:
            raise DataError(f"data.task: there is no file {self.file}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{self.file} is not UTF-8: {error}") from error
        rows: list[Problem] = []
        for number, line in enumerate(lines, start=1):
            if line.strip() and len(rows) < size:
                rows.append(self._problem(line, number))
        if not rows:
            raise DataError(f"{self.file} holds no rows")
        return rows

    def _problem(self, line: str, number: int) -> Problem:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{self.file}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(row, dict) or not {"prompt", "answer"} <= row.keys():
            seen = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise DataError(f"{self.file}, line {number}: needs the fields prompt and answer, has {seen}")
        return Problem(prompt=self._prompt(row["prompt"], number), truth=str(row["answer"]))

    def _prompt(self, value: Any, number: int) -> str | tuple[dict[str, str], ...]:
        if isinstance(value, str):
            return value
        if (
            isinstance(value, list)
            and value
            and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
        ):
            return tuple(value)
        raise DataError(f"{self.file}, line {number}: prompt must be text or a list of role/content messages")

    def score(self, text: str, truth: str, finished: bool) -> float:
        return float(finished and text.strip() == truth.strip())
