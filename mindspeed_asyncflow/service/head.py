"""Ray's head: when it dies or freezes nothing can be started, replaced or ended through Ray, so the run ends.

A thread looks, not the event loop: the main thread may be inside a call that waits for the head.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import psutil

LOOK_S = 0.5
FROZEN_LOOKS = 6  # a daemon that is stopped for so many looks in a row is frozen
PING_EVERY, PING_S, SILENT_PINGS = 2, 2.0, 4  # looks; a ping's deadline; unanswered ones in a row
REACT_S = 5.0  # the main thread gets this long to begin to end the run
DAEMONS = ("gcs_server", "raylet")


def daemons() -> dict[str, int]:
    """Process ids of the head that this process has started, by name; none where the run joined a running Ray."""
    children = psutil.Process().children()
    return {child.name(): child.pid for child in children if child.name() in DAEMONS}


def ping(limit_s: float) -> None:
    """One small question to the head. Raises what Ray raises where nothing comes in time."""
    from ray._private.worker import global_worker  # Ray's public calls have no deadline

    worker: Any = global_worker
    worker.gcs_client.internal_kv_get(b"asyncflow", None, timeout=limit_s)


class HeadWatch:
    """From `start` to `stop`. Where the head is lost, `said` says so and this process gets SIGTERM, which ends the run;
    a main thread that does not react is ended, and the reaper cleans up.

    Counts looks and pings, never seconds: nothing is lost while this very process was stopped.
    """

    def __init__(
        self, daemons: Mapping[str, int], ping: Callable[[float], None] = ping, look_s: float = LOOK_S
    ) -> None:
        self.said = ""
        self._daemons, self._ping, self._look_s = dict(daemons), ping, look_s
        self._looks, self._silent = 0, 0
        self._stopped = dict.fromkeys(daemons, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="head", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Nobody looks any more. A daemon that was stopped goes on, or ending it through Ray would wait for ever."""
        self._over.set()
        for pid in self._daemons.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def look(self) -> str:
        """What is wrong with the head; "" where nothing is known to be."""
        for name, pid in self._daemons.items():
            state = _state(pid)
            if state in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
                return f"Ray's {name} (process {pid}) died"
            self._stopped[name] = self._stopped[name] + 1 if state == psutil.STATUS_STOPPED else 0
            if self._stopped[name] >= FROZEN_LOOKS:
                return f"Ray's {name} (process {pid}) is frozen"
        self._looks += 1
        if self._looks % PING_EVERY == 0:
            self._silent = 0 if self._answers() else self._silent + 1
        if self._silent >= SILENT_PINGS:
            return f"Ray's head has not answered {SILENT_PINGS} calls of {PING_S:g} s each"
        return ""

    def _answers(self) -> bool:
        try:
            self._ping(PING_S)
        except Exception:  # boundary: whatever Ray raises, it is no answer
            return False
        return True

    def _watch(self) -> None:
        while not self._over.wait(self._look_s):
            if said := self.look():
                if not self._over.is_set():
                    self._end(f"{said}: the run cannot go on without it")
                return

    def _end(self, said: str) -> None:
        self.said = said
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._over.wait(REACT_S):
            print(f"error: {said}", file=sys.stderr, flush=True)
            os._exit(1)


def _state(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
