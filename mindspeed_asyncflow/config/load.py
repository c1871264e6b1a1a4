"""From a YAML file and `a.b=c` overrides to a validated Config. Several mistakes are reported together."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import pydantic
import yaml

from mindspeed_asyncflow.config import keys, yamlfile
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read `path`, put each `section.key=value` of `overrides` (value in YAML) over it, and validate.

    Raises ConfigError that lists every mistake with its line or override and the nearest right key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file; examples are in configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a UTF-8 text file: {error}") from None
    return parse_config(text, overrides, name=str(path))


def parse_config(text: str, overrides: Iterable[str] = (), name: str = "configuration") -> Config:
    """As `load_config`, for YAML text; `name` opens the error message."""
    try:
        data, lines, mistakes = yamlfile.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    origins = {key: f"line {line}" for key, line in lines.items()}
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: a mapping of sections is expected ({', '.join(keys.sections())}), not {data!r}")
    data = {key: {} if value is None and key in keys.sections() else value for key, value in data.items()}
    for override in overrides:
        _apply(data, override, origins, mistakes)
    _keep_off(data)
    config = None
    try:
        # JSON mode in strict form: a list may become a tuple, but `true` is no number and "8" is no integer.
        config = Config.model_validate_json(json.dumps(data), strict=True)
    except pydantic.ValidationError as error:
        mistakes += _explain(error, origins)
    except ValueError as error:
        mistakes.append(str(error))
    if config is None or mistakes:
        head = f"{name}: {len(mistakes)} mistake{'s' if len(mistakes) != 1 else ''} in the settings"
        raise ConfigError("\n  ".join([head, *mistakes]))
    return config


def _keep_off(data: dict[str, Any]) -> None:
    """YAML reads `off` as false: where a setting has the word among its choices, the word is meant."""
    for path in (path for path, words in keys.choices().items() if "off" in words):
        *sections, name = path.split(".")
        node: Any = data
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and node.get(name) is False:
            node[name] = "off"


def _apply(data: dict[str, Any], override: str, origins: dict[str, str], mistakes: list[str]) -> None:
    dotted, equals, text = override.partition("=")
    dotted = dotted.strip()
    parts = dotted.split(".")
    if not equals or not all(parts):
        mistakes.append(f"--set {override}: expected section.key=value, such as trainer.lr=1e-4")
        return
    try:
        value, _, wrong = yamlfile.parse(text)
    except ConfigError as error:
        value, wrong = None, [str(error)]
    if wrong:
        mistakes += [f"--set {override}: {problem}" for problem in wrong]
        return
    node = data
    for part in parts[:-1]:
        child = node.get(part)
        if child is not None and not isinstance(child, dict):
            mistakes.append(f"--set {override}: {part} is {child!r}, it has no keys inside")
            return
        # A copy: YAML aliases may share one mapping between two places.
        node[part] = dict(child or {})
        node = node[part]
    node[parts[-1]] = value
    origins[dotted] = f"--set {override}"


def _explain(error: pydantic.ValidationError, origins: dict[str, str]) -> list[str]:
    """One line per wrong key, in the order of the schema."""
    said: dict[str, str] = {}
    for item in error.errors(include_url=False):
        loc = [str(part) for part in item["loc"]]
        # Parts behind the key are list positions and union branches; below an open mapping the key counts.
        length = keys.innermost(loc)[0] + 1
        path = ".".join(loc[: length + keys.is_open_mapping(".".join(loc[:length]))])
        origin = next((origins[p] for p in (path, loc[0] if loc else "") if p in origins), "")
        prefix = f"{origin}: " if origin else ""
        inside = len(loc) > 2 and loc[2].isdigit()  # one of a list of sections
        path = f"{path}[{loc[2]}]" + "".join(f".{part}" for part in loc[3:4]) if inside else path
        if path in said:
            continue
        if item["type"] == "extra_forbidden":
            said[path] = prefix + (_unknown_inside(loc) if inside else _unknown(path, item["input"]))
        else:
            message = item["msg"].replace("Input should be", "must be").replace("Value error, ", "")
            if item["type"] in ("model_type", "model_attributes_type", "dict_type"):
                message = _must_hold_keys(loc, item["input"])
            said[path] = f"{prefix}{path} = {_short(item['input'])}: {message}"
    return list(said.values())


def _unknown_inside(loc: list[str]) -> str:
    section, name, index, key = loc[:4]
    (kind,) = get_args(keys.sections()[section].model_fields[name].annotation)
    return (
        f"{section}.{name}[{index}].{key} is not a setting; each of {section}.{name} has {', '.join(kind.model_fields)}"
    )


def _must_hold_keys(loc: list[str], value: Any) -> str:
    depth, section = keys.innermost(loc)
    inside = next(iter(section.model_fields)) if depth == len(loc) else "key"
    colon = isinstance(value, str) and ":" in value
    hint = "; is a space missing after the colon?" if colon else ""
    return f"must hold keys, such as {{{inside}: ...}}{hint}"


def _unknown(path: str, value: Any) -> str:
    is_section = isinstance(value, dict)
    near = keys.nearest(path, is_section)
    if near:
        return f"{path} is not a setting; did you mean {near}?"
    parts = path.split(".")
    depth, section = keys.innermost(parts)
    if depth:
        return f"{path} is not a setting; {'.'.join(parts[:depth])} has {', '.join(section.model_fields)}"
    return f"{path} is not a setting; the sections are {', '.join(keys.sections())}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def with_absolute_paths(config: Config) -> Config:
    """`config` finds its model and data from every working directory."""
    model, data = config.model, config.data
    places = {"cache": str(Path(model.cache).absolute())}
    if not model.source.startswith(("builtin:", "package:")):
        places["source"] = str(Path(model.source).absolute())
    found: dict[str, Any] = {"task": _absolute_task(data.task)}
    for several in ("mix", "validation"):
        sources = getattr(data, several)
        found[several] = [source.model_copy(update={"task": _absolute_task(source.task)}) for source in sources]
    if data.chat_template is not None:
        found["chat_template"] = str(Path(data.chat_template).absolute())
    return config.model_copy(update={"model": model.model_copy(update=places), "data": data.model_copy(update=found)})


def _absolute_task(task: str) -> str:
    kind, _, place = task.partition(":")
    return f"file:{Path(place).absolute()}" if kind == "file" and place else task


def changed_paths(config: Config) -> list[str]:
    """The settings that differ from their defaults, in the order of the schema."""
    return [doc.path for doc in keys.describe_keys() if reduce(getattr, doc.path.split("."), config) != doc.default]


def dump_resolved(config: Config, only: Collection[str] | None = None) -> str:
    """The whole configuration as YAML with each key's description; `load_config` reads it back to an equal Config.
    `only`: these settings, in place of all."""
    described = {doc.path: doc.description for doc in keys.describe_keys()}
    shown = described if only is None else only
    out: list[str] = []

    def write(values: dict[str, Any], path: str) -> None:
        indent = "  " * path.count(".")
        for name, value in values.items():
            if not any(wanted == path + name or wanted.startswith(f"{path}{name}.") for wanted in shown):
                continue
            line = f"{indent}{name}: {_inline(value)}"
            if path + name in described:
                out.append(f"{line:<44}  # {described[path + name]}")
            else:
                out.append(f"{indent}{name}:")
                write(value, f"{path}{name}.")

    write(config.model_dump(mode="json"), "")
    return "\n".join(out) + "\n"


class _OneLine(yaml.SafeDumper):
    """Writes line ends inside strings as escapes."""


_OneLine.add_representer(
    str, lambda d, text: d.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)
)


def _inline(value: Any) -> str:
    text = yaml.dump(value, Dumper=_OneLine, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    return text.removesuffix("...").strip()
