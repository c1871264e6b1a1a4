"""The launcher's side of one host: a command that runs the host's agent, and what comes from it."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from mindspeed_asyncflow.errors import AsyncFlowError
from mindspeed_asyncflow.platforms.topology import Host
from mindspeed_asyncflow.service.host_agent import ANSWER
from mindspeed_asyncflow.service.inherited import ROOT

# Keys only, and an end within seconds of the host's.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 {host}"
AGENT = "mindspeed_asyncflow.service.host_agent"
REMEMBERED = 8  # last lines of a host, for the message about its end
_ROUTINE = re.compile(r"^ray: \S+ \S+\s+(INFO|SUCC) ")  # what Ray says when nothing is wrong


class HostFailed(AsyncFlowError):
    """A host cannot be reached, does not fit the others, or was lost."""


def launch_words(launcher: str, host: str, python: str) -> list[str]:
    """The command that runs an agent on `host`. Like ssh, `launcher` takes a shell command as its last word; {host} in
    it stands for the host, which is put behind it otherwise."""
    words = shlex.split(launcher)
    named = [word.replace("{host}", host) for word in words]
    if named == words:
        named.append(host)
    return [*named, f"cd {shlex.quote(str(ROOT))} && exec {shlex.quote(python)} -m {AGENT}"]


class Link:
    """`events` gets (link, verb, content) for every answer of the agent, and (link, "closed", words) at the end.

    Output of the host goes to `log`; that of the run is shown here too.
    """

    def __init__(self, host: Host, command: Sequence[str], log: Path, events: queue.SimpleQueue) -> None:
        self.host, self.name = host, host.name
        self.heard = time.monotonic()  # when the agent last gave a sign of life
        self.greeted = False
        self.ready: dict[str, Any] = {}
        self.lines: deque[str] = deque(maxlen=REMEMBERED)
        self._events = events
        self._log: TextIO = log.open("a", encoding="utf-8", buffering=1)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C at the terminal is for the launcher, which stops the hosts in order
            )
        except OSError as error:
            raise HostFailed(f"the launcher command {command[0]!r} cannot be run: {error.strerror}") from None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            line = line.rstrip("\n")
            self.heard = time.monotonic()
            if line.startswith(ANSWER):
                [(verb, content)] = json.loads(line.removeprefix(ANSWER)).items()
                self.greeted = True
                if verb != "said":
                    self._events.put((self, verb, content))
                    continue
                print(line := content, flush=True)
            if not _ROUTINE.search(line):
                self.lines.append(line)
            self._log.write(line + "\n")
        status = self._process.wait()
        self._log.close()
        how = f"killed by signal {-status}" if status < 0 else f"status {status}"
        self._events.put((self, "closed", how))

    def send(self, **request: Any) -> None:
        """Nothing happens where the connection has ended: its `closed` comes or has come."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def end(self, patience_s: float) -> bool:
        """Close the connection, and end the command after `patience_s`. Whether that was not needed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=patience_s)
            return True
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        return "".join(f"\n    {line}" for line in self.lines)
