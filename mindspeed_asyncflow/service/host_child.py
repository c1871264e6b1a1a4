"""A child process of a host agent, whose output is passed on line by line."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Sequence

from mindspeed_asyncflow.service.inherited import ROOT

LAST_LINES_S = 2.0  # whoever else holds the child's output open does not delay the news of its end


class Child:
    """`say` takes each line, behind `name` if there is one; `seen` the bare line; `ended` the exit status, after the
    last line. A signal to this process is not one to the child."""

    def __init__(
        self,
        command: Sequence[str],
        say: Callable[[str], None],
        *,
        name: str = "",
        seen: Callable[[str], None] = lambda line: None,
        ended: Callable[[int], None],
    ) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._said = threading.Thread(target=self._pump, args=(say, f"{name}: " if name else "", seen), daemon=True)
        self._said.start()
        threading.Thread(target=self._wait, args=(ended,), daemon=True).start()

    def _pump(self, say: Callable[[str], None], start: str, seen: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            say(start + line.rstrip())
            seen(line)

    def _wait(self, ended: Callable[[int], None]) -> None:
        status = self._process.wait()
        self._said.join(timeout=LAST_LINES_S)
        ended(status)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def stop(self, grace_s: float) -> None:
        """Ask it to end, and end it after `grace_s`."""
        self._process.terminate()
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
