"""A process that is told what to do in lines of JSON and answers in lines of JSON. Standard library only.

Parent: `Child(...)`, `ask`. Child: `serve({...})`; whatever libraries print there goes to the error output.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_GRACE_S = 15.0


class ChildFailed(RuntimeError):
    """The child answered with an error, died, or did not answer in time."""


class Child:
    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._buffer = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if environment is None else dict(environment),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer(timeout_s, do)

    def tell(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildFailed(f"{self.name} is gone; it was told to {do}") from None

    def answer(self, timeout_s: float, do: str = "answer") -> Any:
        """Raises ChildFailed with the child's words when it failed, or after `timeout_s`."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._kill()  # or its late answer would be taken for the next one
                raise ChildFailed(f"{self.name} did not {do} within {timeout_s:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise ChildFailed(f"{self.name} ended with {self._process.wait(_GRACE_S)} when it should {do}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise ChildFailed(f"{self.name} could not {do}: {reply['error']}")
        return reply["value"]

    def close(self, grace_s: float = _GRACE_S) -> None:
        """The end of its input ends the child; one that stays is killed, with everything it started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._kill()
        finally:
            self._process.stdout.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_GRACE_S)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(_GRACE_S if kind is None else 3.0)


def serve(verbs: Mapping[str, Callable[..., Any]]) -> None:
    """Answers the parent's lines until its end of the pipe is closed."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = {"value": verbs[command.pop("do")](**command)}
        except Exception as error:  # the boundary of the process: the parent decides what a failure means
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
