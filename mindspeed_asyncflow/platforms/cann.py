"""Versions of CANN and of the driver, out of the files that their packages leave. Loads nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

ASCEND = Path("/usr/local/Ascend")  # where the packages are installed if nothing else is said
HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # set by CANN's set_env.sh
FOLDERS = ("cann", "ascend-toolkit/latest")


def cann_version(environment: Mapping[str, str]) -> str:
    """Of the toolkit that this process's environment names; "" where its set_env.sh was not read."""
    homes = [Path(environment[name]) for name in HOMES if environment.get(name)]
    return next(filter(None, map(_toolkit, homes)), "")


def installed_cann(folder: Path = ASCEND) -> str:
    """Of the toolkit in its usual place, whether the environment names it or not; "" where there is none."""
    return next(filter(None, (_toolkit(folder / name) for name in FOLDERS)), "")


def driver_version(folder: Path = ASCEND) -> str:
    return _value(folder / "driver" / "version.info")


def _toolkit(home: Path) -> str:
    return next(filter(None, map(_value, sorted(home.glob("*-linux/ascend_toolkit_install.info")))), "")


def _value(file: Path) -> str:
    """What a file says behind `version=`; "" where it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^\s*version\s*=\s*(\S+)", text, re.I | re.M)
    return found[1] if found else ""
