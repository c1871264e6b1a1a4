"""What processes of a Ray node write, as it grows."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

from mindspeed_asyncflow.service.inherited import worth_telling

LOOK_S = 1.0
PATTERNS = ("worker-*.err", "worker-*.out", "raylet.err", "gcs_server.err")
_PID = re.compile(r"-(\d+)\.(?:err|out)$")


class LogTail:
    """Passes new lines below `scratch`, the folder of a node's Ray, to `say`."""

    def __init__(self, scratch: Path, say: Callable[[str], None]) -> None:
        self._scratch, self._say = scratch, say
        self._read: dict[Path, int] = {}  # bytes of each file that were passed on
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._done.wait(LOOK_S):
            self._look(whole=False)

    def finish(self) -> None:
        """Pass on what is left; nobody writes any more."""
        self._done.set()
        self._thread.join()
        self._look(whole=True)

    def _look(self, *, whole: bool) -> None:
        for pattern in PATTERNS:
            for file in sorted(self._scratch.glob(f"session_2*/logs/{pattern}")):
                self._pass_on(file, whole)

    def _pass_on(self, file: Path, whole: bool) -> None:
        """Complete lines only, unless `whole`."""
        start = self._read.get(file, 0)
        with file.open("rb") as opened:
            opened.seek(start)
            new = opened.read()
        if not whole:
            new = new[: new.rfind(b"\n") + 1]
        self._read[file] = start + len(new)
        pid = _PID.search(file.name)
        name = f"process {pid[1]}" if pid else file.stem
        for line in worth_telling(new.decode(errors="replace")):
            self._say(f"{name}: {line}")
