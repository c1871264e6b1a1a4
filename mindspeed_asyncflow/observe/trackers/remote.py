"""A helper process that hands metrics to a library for tracking: nothing that happens in it can disturb the run.

Both sides speak JSON lines. To the helper: the introduction, then one line for each step, then the end of the pipe.
From it: `id` once the service has the run, with `place` (where a user finds it) and `warning` (mostly empty); `failed`
with a reason. What the library prints goes to a file.
"""

from __future__ import annotations

import json
import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.observe.trackers.base import Tracker

MOST_WAITING = 1000  # steps that a helper may be behind
LAST_WORDS_S = 5.0  # what a process that is gone has said is read by then
# The helper's Python may be another one, which has this package from us and everything else of its own.
_START = "import sys; sys.path.append(sys.argv[1]); from mindspeed_asyncflow.observe.trackers.child import main; main()"
_ROOT = Path(__file__).parents[3]
# Nothing but metrics and settings is sent, and nothing at all unless observe.online is true.
_QUIET = ("env", "WANDB_ERROR_REPORTING=false", "MLFLOW_DISABLE_TELEMETRY=true", "DO_NOT_TRACK=true")


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a service is told of the run."""

    service: str
    folder: str  # of the run
    project: str
    run: str
    settings: Mapping[str, Any]  # nested, as JSON values
    online: bool


class Failed(Exception):
    """A tracker has ended, or is too slow."""


class Helper(Tracker):
    """One service behind one process."""

    def __init__(self, told: Introduction, ids: Path, python: str | None = None) -> None:
        """`ids`: file with the run's id at each service, by which a run that goes on is continued there. `python`: with
        the service's library; default: this one."""
        self._told, self._ids = told, ids
        self._failed = ""
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        log = ids.parent / "trackers"
        log.mkdir(exist_ok=True)
        with open(log / f"{told.service}.log", "ab") as said:
            self._process = subprocess.Popen(
                [*_QUIET, python or sys.executable, "-c", _START, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,  # a Ctrl-C at the terminal is for the driver
            )
        self._log = log / f"{told.service}.log"
        self._send({**asdict(told), "id": read_ids(ids).get(told.service, "")})
        threading.Thread(target=self._pass_on, name=f"to {told.service}", daemon=True).start()
        self._listener = threading.Thread(target=self._listen, name=f"from {told.service}", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        if self._failed:
            raise Failed(self._failed)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._send({"step": step, "at": at, "metrics": finite})

    def finish(self) -> None:
        if not self._failed:
            self._send(None)

    def close(self, deadline: float) -> None:
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise Failed(
                f"it has not finished in time (observe.trackers_wait_s), the end may be missing; see {self._log}"
            ) from None
        self._listener.join(LAST_WORDS_S)
        if self._failed or code:
            raise Failed(self._failed or f"its process ended with code {code}; see {self._log}")

    def _send(self, message: Mapping[str, Any] | None) -> None:
        try:
            self._lines.put_nowait(None if message is None else json.dumps(message) + "\n")
        except queue.Full:
            self._process.kill()
            raise Failed(f"it is {MOST_WAITING} steps behind; see {self._log}") from None

    def _pass_on(self) -> None:
        """A pipe that nobody reads makes this thread wait, and not the run."""
        assert self._process.stdin is not None
        try:
            while (line := self._lines.get()) is not None:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            self._process.stdin.close()
        except (OSError, ValueError):  # it is gone; the other thread says so
            return

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if "id" in said:
                write_id(self._ids, self._told.service, said["id"])
                get_logger("trackers").info("%s: %s", self._told.service, said["place"])
                if said["warning"]:
                    get_logger("trackers").warning("%s: %s", self._told.service, said["warning"])
            elif "failed" in said:
                self._failed = f"{said['failed']}; see {self._log}"
        if not self._failed and self._process.wait() != 0:
            self._failed = f"its process ended with code {self._process.returncode}; see {self._log}"


_ONE_AT_A_TIME = threading.Lock()  # helpers of this driver share the file


def read_ids(path: Path) -> dict[str, str]:
    """The run's id at each service; empty where there is none yet, or the file is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def write_id(path: Path, service: str, run_id: str) -> None:
    with _ONE_AT_A_TIME:
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(read_ids(path) | {service: run_id}, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
