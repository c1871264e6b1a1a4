"""One scorer process, seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.errors import RewardError

Item = list[Any]  # the fields of an `Answer`
Reply = tuple[float | None, str, dict[str, float]]  # value, error, what each of several scorers gave

START_S = 60.0  # deadline for a process to be up; libraries of a task may take seconds to import
_PACKAGE_ROOT = str(Path(__file__).parents[2])
_BOOT = """
import importlib, json, sys
sys.path[:], module, *call = json.loads(sys.argv[1])
importlib.import_module(module).main(*call)
"""


class ScorerProcess:
    """Scores the answers that it was given one after the other and tells of each as soon as it is done.

    `outstanding` holds their indices, first the one that is being scored since `since` (monotonic seconds).
    """

    module = "mindspeed_asyncflow.rewards.worker"  # its `main` runs inside
    kind = "scorer"

    def __init__(self, spec: dict[str, Any]) -> None:
        self.channel, far = socket.socketpair()
        self.channel.settimeout(START_S)
        call = [[_PACKAGE_ROOT, *sys.path], self.module, far.fileno(), os.getpid(), spec]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(call)],
            stdin=subprocess.DEVNULL,
            pass_fds=[far.fileno()],
            start_new_session=True,  # an interrupt at the terminal is for the run, which then ends this process
        )
        far.close()
        self.ready = False
        self.outstanding: deque[int] = deque()
        self.since = time.monotonic()
        self.tail_given_away = False
        self._received = b""

    @property
    def idle(self) -> bool:
        return self.ready and not self.outstanding

    def give(self, indices: Sequence[int], items: Sequence[Item]) -> None:
        """Start scoring `items[i]` for each index."""
        self.outstanding.extend(indices)
        self.since, self.tail_given_away = time.monotonic(), False
        self.channel.sendall(json.dumps([items[i] for i in indices]).encode() + b"\n")

    def receive(self) -> list[tuple[int, Reply]] | None:
        """Scores that have arrived, by index; None if the process is gone. Call when the channel is readable."""
        try:
            data = self.channel.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if messages and not self.ready:
            first = messages.pop(0)
            if first[0] == "failed":
                raise RewardError(f"{self.kind} process cannot start: {first[1]}")
            self.ready = True
        if messages:
            self.since = time.monotonic()
        return [(self.outstanding.popleft(), (value, error, parts)) for value, error, parts in filter(None, messages)]

    def kill(self) -> int:
        """End the process and everything that it started, now; its exit code."""
        self.channel.close()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # already gone
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait(timeout=START_S)
