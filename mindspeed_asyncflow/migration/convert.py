"""From the text of another system's settings file to the text of ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mindspeed_asyncflow.config import Config, describe_keys, feasibility, parse_config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.migration.areal import AREAL
from mindspeed_asyncflow.migration.foreign import Foreign
from mindspeed_asyncflow.migration.mindspeed_rl import MINDSPEED_RL
from mindspeed_asyncflow.migration.table import Outcome, System, apply, shown
from mindspeed_asyncflow.migration.verl import VERL

SYSTEMS = {"verl": VERL, "mindspeed-rl": MINDSPEED_RL, "areal": AREAL}
_SHORT_ANSWER = 512  # tokens that the default deadlines are long enough for
_TOKEN_S = 0.3  # of a slow engine, for the deadline of a batch of answers


@dataclass(frozen=True, slots=True)
class Migrated:
    """What came out: `text` is a settings file that loads, the rest is what the reader should know."""

    system: str
    text: str
    settings: int  # that differ from our defaults
    lost: tuple[tuple[str, str], ...]  # their key and value, why there is no equivalent
    undecided: tuple[tuple[str, str], ...]  # what must be set by hand, and to what
    unknown: tuple[str, ...]  # their keys and values that the table does not have

    def notes(self) -> list[str]:
        """The lists as lines."""
        groups = (
            ("to decide by hand", [f"{key}: {text}" for key, text in self.undecided]),
            ("without an equivalent", [f"{key} ({why})" for key, why in self.lost]),
            ("unknown here, look whether they matter", list(self.unknown)),
        )
        return [line for title, rows in groups if rows for line in (f"{title}:", *(f"  {row}" for row in rows))]


def migrate(text: str, name: str = "file", system: str | None = None) -> Migrated:
    """`system`: one of SYSTEMS, found from the keys if None.

    Raises ConfigError for what is no YAML mapping, and where no or several systems' keys are found.
    """
    file = Foreign(text, name)
    source = SYSTEMS[system] if system else _recognised(file, name)
    out = apply(source, file)
    out.undecided += [] if out.value("rollout.kv_cache_mb", 0) else [_CACHE]
    _fill(out)
    defaults = Config()
    chosen: dict[str, tuple[Any, str]] = {}
    for key, (value, comment) in out.settings.items():
        try:
            read = _value(_parse({key: value}), key)
        except ConfigError as error:
            reason = str(error).splitlines()[-1].strip().removeprefix("line 1: ")
            out.undecided.append((key, f"{shown(value)}, {comment}, is refused: {reason}"))
            continue
        if read != _value(defaults, key):
            chosen[key] = (value, comment)
    migrated = Migrated(
        source.name,
        "",
        len(chosen),
        tuple(dict.fromkeys(out.lost)),
        tuple(dict.fromkeys(out.undecided)),
        tuple(out.unknown),
    )
    lines = [f"# From {name} ({source.name}). Look at the notes at the end, then: asyncflow check THIS_FILE"]
    lines += _yaml(chosen)
    lines += [f"# {line}" for line in migrated.notes()]
    whole = "\n".join(lines) + "\n"
    parse_config(whole, name=f"what was made of {name}")
    return Migrated(
        migrated.system, whole, *(getattr(migrated, n) for n in ("settings", "lost", "undecided", "unknown"))
    )


_CACHE = (
    "rollout.kv_cache_mb",
    "key/value cache of a replica in MiB; `asyncflow check` says what fits beside the weights",
)


def _recognised(file: Foreign, name: str) -> System:
    found = [key for key, system in SYSTEMS.items() if any(file.has(known) for known in system.known_by)]
    if len(found) == 1:
        return SYSTEMS[found[0]]
    known = "; ".join(f"{key} by {' or '.join(system.known_by)}" for key, system in SYSTEMS.items())
    seen = f"has keys of {' and '.join(found)}" if found else "has no key by which a system is known"
    raise ConfigError(f"{name}: {seen} ({known}); say which it is with --from {'|'.join(SYSTEMS)}")


def _fill(out: Outcome) -> None:
    """Sizes and deadlines that the other settings ask for, and that other systems do not have."""
    prompt, answer = out.value("data.max_prompt_tokens", 64), out.value("rollout.max_new_tokens", 5)
    lag, versions = out.value("workflow.max_lag", 1), 3
    if not all(isinstance(size, int) for size in (prompt, answer, lag)):
        return  # refused below, with the reason
    if out.value("trainer.micro_batch_tokens", 4096) < prompt + answer:
        out.put("trainer.micro_batch_tokens", prompt + answer, "at least the longest sample must fit")
    if lag >= versions:
        out.put("workflow.keep_versions", lag + 1, "more than workflow.max_lag")
    if answer > _SHORT_ANSWER:
        seconds = max(600, -int(-answer * _TOKEN_S // 100) * 100)
        why = f"time for answers of {answer} tokens"
        for key in ("rollout.timeout_s", "workflow.watchdog_s", "dock.lease_s"):
            out.put(key, seconds, why)
        out.put("workflow.start_timeout_s", 900, "time to load a large model")
    try:
        sized = _parse({key: value for key, (value, _) in out.settings.items()})
    except ConfigError:
        return
    need = -(-feasibility.arena_bytes(sized) >> 20)
    if need > sized.dock.arena_mb * sized.dock.pairs:
        out.put("dock.arena_mb", need, "what the samples under way need")


def _parse(settings: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return parse_config(json.dumps(tree), name="setting")


def _value(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _yaml(chosen: dict[str, tuple[Any, str]]) -> list[str]:
    """In the order of the schema, each with its comment."""
    lines: list[str] = []
    open_sections: list[str] = []
    for doc in describe_keys():
        if doc.path not in chosen:
            continue
        *sections, leaf = doc.path.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
        open_sections = sections
        value, comment = chosen[doc.path]
        setting = f"{'  ' * len(sections)}{leaf}: {json.dumps(value, ensure_ascii=False)}"
        lines.append(f"{setting:<40}  # {' '.join(comment.split())}")
    return lines
