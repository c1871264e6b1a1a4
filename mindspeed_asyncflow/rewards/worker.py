"""What runs inside a scorer process. Imports the task and nothing heavy: it must be up in a fraction of a second.

Protocol, one JSON text per line on one socket. To the process: a list of [text, truth, finished]. Back: first
["ready"] or ["failed", reason], then for each answer, as soon as it is scored, [value, error]: a number and "";
null and "" where the scorer abstains; null and what went wrong.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import socket
import sys
from typing import Any

from mindspeed_asyncflow.data.tasks import Task, build_task
from mindspeed_asyncflow.errors import DataError

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int, name: str, options: dict[str, Any]) -> None:
    """Serve the socket `descriptor` until the other side closes it."""
    _end_with_parent(parent)
    with socket.socket(fileno=descriptor) as channel:
        try:
            task = build_task(name, options)
        except DataError as error:
            _send(channel, ["failed", str(error)])
            return
        _send(channel, ["ready"])
        for line in channel.makefile("r", encoding="utf-8", newline="\n"):
            for text, truth, finished in json.loads(line):
                _send(channel, score_one(task, text, truth, finished))


def score_one(task: Task, text: str, truth: str, finished: bool) -> list[float | str | None]:
    """[value, error] of one answer. Whatever the scorer does wrong becomes a named error, never a number."""
    try:
        value = task.score(text, truth, finished)
        if value is None:
            return [None, ""]
        number = float(value)
    except Exception as error:  # boundary: scorers are user code, their failures are data on the sample
        return [None, f"{type(error).__name__}: {error}"]
    return [number, ""] if math.isfinite(number) else [None, f"scorer returned {number}, not a finite number"]


def _send(channel: socket.socket, message: list[Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _end_with_parent(parent: int) -> None:
    """Let the kernel end this process with its parent, also while a scorer spins in compiled code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
