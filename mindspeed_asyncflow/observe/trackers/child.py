"""Inside a helper process: the library of one service, which may be missing, slow or broken. See `remote.py`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import IO, Any

from mindspeed_asyncflow.observe.trackers.services import SERVICES, Service


def main() -> None:
    """Until the pipe from the driver ends, be it that it is dead."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "rb") as nothing:  # a library that asks for a login gets no line of ours,
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # and what it prints is no answer
    sys.exit(serve(lines, answers))


def serve(lines: IO[str], answers: IO[str]) -> int:
    """The exit code: 0, or 1 after `failed` was said."""

    def say(**message: Any) -> None:
        with contextlib.suppress(OSError):  # the driver is gone
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    try:
        told = json.loads(lines.readline())
        service: Service = SERVICES[told["service"]](told)
        say(id=service.id, place=service.place, warning=service.warning)
        for line in lines:
            if not line.endswith("\n"):  # the driver died while it wrote
                break
            step = json.loads(line)
            service.write(step["step"], step["at"], step["metrics"])
        service.close()
    except ImportError as error:
        say(failed=f"{error}; install it (bash scripts/trackers.sh) and set observe.trackers_python")
        return 1
    except BaseException as error:  # boundary: whatever a library raises, SystemExit too, becomes a sentence
        text = " ".join(str(error).split())
        say(failed=f"{type(error).__name__}: {text[:300]}")
        raise
    return 0
