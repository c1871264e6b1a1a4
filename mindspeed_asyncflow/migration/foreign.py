"""A settings file of another system as dotted keys. References to other keys are followed; what was asked is noted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mindspeed_asyncflow.config import yamlfile
from mindspeed_asyncflow.errors import ConfigError

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 20  # references behind each other; more is a circle
_MISSING = object()


class Foreign:
    """The keys of a file. `get` marks a key as used; `rest` gives those that nobody asked for."""

    def __init__(self, text: str, name: str) -> None:
        """Raises ConfigError, with the line, for text that is no YAML mapping or gives a key twice."""
        try:
            data, self._lines, mistakes = yamlfile.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        if mistakes:
            raise ConfigError("\n  ".join([f"{name}: not clear what is meant", *mistakes]))
        if not isinstance(data, dict):
            raise ConfigError(f"{name}: a mapping of settings is expected, not {str(data)[:60]!r}")
        self._data: dict[str, Any] = data
        self._used: set[str] = set()
        self.unresolved: dict[str, str] = {}  # key -> reference that leads nowhere in this file

    def has(self, key: str) -> bool:
        """Whether the file has the key, whatever its value; does not count as use."""
        return self._raw(key) is not _MISSING

    def get(self, key: str, default: Any = None) -> Any:
        """Its value with references followed; `default` where the file is silent, says null, or leads nowhere."""
        self._used.add(key)
        value = self._raw(key)
        value = None if value is _MISSING else self._resolved(value, key, key, 0)
        return default if value is None else value

    def rest(self) -> Iterator[tuple[str, Any]]:
        """Keys with a value (not null, not empty) that were not asked for, in the order of the file."""
        for key, value in self._leaves(self._data, ""):
            if not any(key == used or key.startswith(f"{used}.") for used in self._used):
                yield key, value

    def _raw(self, key: str) -> Any:
        node: Any = self._data
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return _MISSING
            node = node[part]
        return None if node == "???" else node  # how Hydra writes what the command line must give

    def _leaves(self, node: dict[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            key = f"{path}{name}"
            if isinstance(value, dict) and value:
                yield from self._leaves(value, f"{key}.")
            elif value not in (None, "", "???", [], {}):
                yield key, value

    def _resolved(self, value: Any, key: str, asked: str, depth: int) -> Any:
        if isinstance(value, list):
            return [self._resolved(item, key, asked, depth) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > _DEEPEST:
            raise ConfigError(f"{asked}: its references lead in a circle, at {key}: {value}")
        whole = _REFERENCE.fullmatch(value)
        if whole:
            found = self._reference(whole[1], key, asked, depth)
            return None if found is _MISSING else found
        text, count = _REFERENCE.subn(lambda m: str(self._text(m[1], key, asked, depth)), value)
        if asked in self.unresolved:
            return None
        return self._resolved(text, key, asked, depth + 1) if count and "${" in text else text

    def _text(self, expression: str, key: str, asked: str, depth: int) -> Any:
        found = self._reference(expression, key, asked, depth)
        return "" if found is _MISSING else found

    def _reference(self, expression: str, key: str, asked: str, depth: int) -> Any:
        """`a.b`, `.sibling`, `..of_the_parent` or `oc.select:a.b,default`."""
        resolver, colon, arguments = expression.partition(":")
        target, comma, fallback = (arguments if colon else expression).partition(",")
        if colon and resolver != "oc.select":
            self.unresolved[asked] = f"${{{expression}}}"
            return _MISSING
        target = target.strip()
        up = len(target) - len(target.lstrip("."))
        if up:
            target = ".".join([*key.split(".")[:-up], target.lstrip(".")])
        found = self._raw(target)
        if found is _MISSING:
            if not comma:
                self.unresolved[asked] = f"${{{expression}}}"
                return _MISSING
            found = yamlfile.parse(fallback.strip())[0]
        return self._resolved(found, target, asked, depth + 1)
