"""Ray and the processes of a run from the first to the last one: nothing of them survives `end`, however it came."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.platforms.base import current
from mindspeed_asyncflow.service import cleanup
from mindspeed_asyncflow.service.head import HeadWatch, daemons
from mindspeed_asyncflow.service.placement import Cluster, Demand
from mindspeed_asyncflow.service.sides import check_environments
from mindspeed_asyncflow.service.workers import Workers


class Processes:
    """`wanted`: devices by kind of worker; None: those of a whole run."""

    def __init__(self, config: Config, wanted: Sequence[Demand] | None = None) -> None:
        self.config = config
        self.cluster = Cluster(config, current(config.run.platform).name, wanted)
        self.mark = cleanup.mark_environment()
        self.reaper: subprocess.Popen | None = None
        self.head: HeadWatch | None = None
        self.last_words: dict[int, str] = {}  # of every worker, by process id, after `end`
        self.lost = ""  # what became of Ray's head, after `end`; "" where it was there

    @property
    def started(self) -> bool:
        return self.reaper is not None

    def start(self) -> None:
        """Before any worker. Raises `PlatformError` where the devices are not there."""
        for name in cleanup.remove_stale(cleanup.SHM) + cleanup.remove_stale(Path(tempfile.gettempdir())):
            get_logger("service").info("removed what a dead run left: %s", name)
        self.reaper = cleanup.start_reaper(self.mark, self.cluster.make_folder())
        self.cluster.start()
        self.head = HeadWatch(daemons())
        self.head.start()
        for key, found in check_environments(self.config, self.config.workflow.start_timeout_s).items():
            get_logger("service").info("%s: %s", key, found)

    def _lost_head(self) -> str:
        return "" if self.head is None else self.head.said or self.head.look()

    def end(self, workers: Workers | None) -> None:
        """End every process and remove what they shared. A second Ctrl-C must not leave anything behind."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.reaper is None:
            return
        self.lost = self._lost_head()
        if self.head is not None:
            self.head.stop()
        shared = cleanup.shared_files(cleanup.run_processes(self.mark, self.cluster.folder, spare=self.reaper.pid))
        if workers is not None:
            workers.kill()
            self.last_words = {w.pid: self.cluster.last_words(w.pid) for w in workers.workers if w.pid}
        if not self.lost:
            self.cluster.stop()
        left = cleanup.run_processes(self.mark, self.cluster.folder, spare=self.reaper.pid)
        killed = cleanup.end_processes(left, *([0.0] if self.lost else []))  # nobody tells them to end
        if killed:
            get_logger("service").debug("killed at the end: %s", ", ".join(killed))
        cleanup.remove_own_shm()
        for file in shared:
            file.unlink(missing_ok=True)
        self.cluster.remove_folder()
        cleanup.stop_reaper(self.reaper)

    def leave(self, code: int) -> None:
        """Last, before this process exits with `code`: without its head, Ray's own ending would wait or crash."""
        if self.lost:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
