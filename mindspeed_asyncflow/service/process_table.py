"""`processes.json` in the run folder: which process is who, for people and for `asyncflow chaos`."""

from __future__ import annotations

import json
import os
from pathlib import Path


class ProcessTable:
    """Names (`rollout0`, `trainer1`, `dock0`, `driver`, `raylet`) -> process id and node address, as of now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[str, tuple[int, str]] = {}

    def enter(self, name: str, pid: int, host: str) -> None:
        """`name` is this process from now on. `host`: address of its node."""
        if self._found.get(name) == (pid, host):
            return
        self._found[name] = pid, host
        text = json.dumps({n: {"pid": p, "host": h} for n, (p, h) in self._found.items()}, indent=1)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text + "\n", encoding="utf-8")
        os.replace(fresh, self.path)  # a reader sees the table before or after, never half of it

    def remove(self) -> None:
        """The run is over: the ids may mean other processes soon."""
        self.path.unlink(missing_ok=True)


def read_table(path: Path) -> dict[str, tuple[int, str]]:
    """(process id, node address) by name; empty where no run is on."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {name: (entry["pid"], entry["host"]) for name, entry in found.items()}
