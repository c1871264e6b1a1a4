"""What runs inside a scorer process. Imports nothing heavy: it must be up in a fraction of a second.

Protocol, one JSON text per line on one socket. To the process: a list of answers, the fields of `Answer` each. Back:
first ["ready"] or ["failed", reason], then for each answer, as soon as it is scored, [value, error, parts]: a number
and ""; null and "" where all scorers abstain; null and what went wrong.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any

from mindspeed_asyncflow.errors import DataError, RewardError
from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.registry import Spec, build

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int, spec: dict[str, Any]) -> None:
    """Serve the socket `descriptor` until the other side closes it."""
    _end_with_parent(parent)
    with socket.socket(fileno=descriptor) as channel:
        try:
            scorers = build(Spec(**spec))
        except (DataError, RewardError) as error:
            _send(channel, ["failed", str(error)])
            return
        _send(channel, ["ready"])
        for line in channel.makefile("r", encoding="utf-8", newline="\n"):
            answers = [Answer(*fields) for fields in json.loads(line)]
            asked = scorers.ask_batches(answers) if scorers.in_batches else {}
            for i, answer in enumerate(answers):
                result = scorers.result(answer, {name: said[i] for name, said in asked.items()})
                _send(channel, [result.value, result.error, result.parts])


def _send(channel: socket.socket, message: list[Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _end_with_parent(parent: int) -> None:
    """Let the kernel end this process with its parent, also while a scorer spins in compiled code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
