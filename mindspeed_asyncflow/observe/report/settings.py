"""Settings of runs side by side, and which of them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_asyncflow.config.keys import describe_keys

_NOT_THE_RUN = ("run.seed", "run.name", "run.folder")  # runs that differ in these only are one experiment
_ABSENT = "—"


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table: one value of `values` for each run, as YAML."""

    key: str
    values: list[str]
    default: str
    meaning: str


def read_settings(path: Path, missing: list[str]) -> tuple[dict[str, Any], str]:
    """(dotted key to value, the text) of `config.yaml`."""
    if not path.exists():
        missing.append("config.yaml: the resolved configuration")
        return {}, ""
    text = path.read_text(encoding="utf-8")
    found = yaml.safe_load(text)
    sections = {doc.path.rpartition(".")[0] for doc in describe_keys()}
    flat: dict[str, Any] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and key in sections:
                walk(value, f"{key}.")
            else:
                flat[key] = value

    walk(found if isinstance(found, Mapping) else {}, "")
    return flat, text


def settings_table(runs: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Every setting that a run has, in the order of the documentation; those that it does not know at the end."""
    docs = {doc.path: doc for doc in describe_keys()}
    here = dict.fromkeys(key for run in runs for key in run)
    rows = []
    for key in [*(k for k in docs if k in here), *(k for k in here if k not in docs)]:
        doc = docs.get(key)
        default, text = (doc.default, shown(doc.default)) if doc else (None, _ABSENT)
        values = [  # 256 and 256.0 are one value
            _ABSENT if key not in run else text if doc and run[key] == default else shown(run[key]) for run in runs
        ]
        rows.append(Setting(key, values, text, doc.description if doc else ""))
    return rows


def seeds_of_one(runs: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each run the number of its experiment: the same for runs that differ in seed and folder only."""
    seen: list[Mapping[str, Any]] = []
    numbers = []
    for run in runs:
        what = {key: value for key, value in run.items() if key not in _NOT_THE_RUN}
        if what not in seen:
            seen.append(what)
        numbers.append(seen.index(what))
    return numbers


def shown(value: Any) -> str:
    """As one line of YAML."""
    if isinstance(value, tuple | set | frozenset):
        value = list(value)
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    except yaml.YAMLError:  # a default that is an object of ours
        return str(value)
    return text.strip().removesuffix("...").strip()
