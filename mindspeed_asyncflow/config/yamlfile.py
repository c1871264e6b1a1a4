"""YAML reading with line numbers: duplicate keys are refused and `1e-6` is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml

from mindspeed_asyncflow.errors import ConfigError


class _Loader(yaml.SafeLoader):
    pass


# YAML 1.1 reads 1e-6 as text because it has no dot, and 2026-11-01 as a date; neither is what a settings file means.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _walk(node: yaml.Node, path: str, lines: dict[str, int], mistakes: list[str], open_nodes: set[int]) -> None:
    if id(node) in open_nodes:
        mistakes.append(f"line {node.start_mark.line + 1}: {path or 'the file'} contains itself")
        return
    open_nodes.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            child = f"{path}.{name}" if path else name
            if name in seen and name != "<<":
                mistakes.append(f"line {line}: {child} is given twice, first on line {seen[name]}")
            seen.setdefault(name, line)
            lines.setdefault(child, line)
            _walk(value, child, lines, mistakes, open_nodes)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _walk(item, path, lines, mistakes, open_nodes)
    open_nodes.discard(id(node))


def parse(text: str) -> tuple[Any, dict[str, int], list[str]]:
    """Value, line of every dotted key, and mistakes (duplicate keys). Raises ConfigError for text that is not YAML."""
    loader = _Loader(text)
    lines: dict[str, int] = {}
    mistakes: list[str] = []
    try:
        node = loader.get_single_node()
        if node is None:
            return None, lines, mistakes
        _walk(node, "", lines, mistakes, set())
        return (None if mistakes else loader.construct_document(node)), lines, mistakes
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = str(getattr(error, "problem", None) or error)
        # What `lr:1e-4` in the line before leads to as well.
        hint = (
            "; a key needs a space after its colon, a value with a colon needs quotes" if "mapping" in problem else ""
        )
        raise ConfigError(f"{where}not valid YAML: {problem}{hint}") from None
    finally:
        loader.dispose()
