"""What every worker process of a run finds around itself, whoever starts the Ray that it belongs to. Loads no Ray."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # where the package lies
OBJECT_STORE_BYTES = 128 << 20  # only small reports travel through Ray

_OF_EVERY_WORKER = re.compile(r"^:(job_id|actor_name|task_name):|:\d+: \w*Warning: |^\s*warnings\.warn\($")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def worker_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Variables that processes of a node inherit from its Ray, beside those of `given`, which may set some of them."""
    found = {"TOKENIZERS_PARALLELISM": "false", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    defaults = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    found |= {name: given.get(name, value) for name, value in defaults.items()}
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        found["RAY_COLOR_PREFIX"] = "0"  # no colour codes in files
    paths = [p for p in given.get("PYTHONPATH", "").split(os.pathsep) if p]
    if str(ROOT) not in paths:
        paths.insert(0, str(ROOT))
    return found | {"PYTHONPATH": os.pathsep.join(paths)}


def worth_telling(text: str) -> list[str]:
    """Lines of a worker's stderr, plain, without those that every worker writes."""
    lines = [_COLOUR.sub("", line).rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not _OF_EVERY_WORKER.search(line)]
