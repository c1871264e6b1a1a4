"""What a launch over several hosts has running on each of them: `python -m mindspeed_asyncflow.service.host_agent`.

It starts Ray and, on the first host, the run. Lines of JSON on standard input tell it what to do, one at a time:

request                              answer
{"hello": {...}}                     {"ready": what this host is and has}, or {"failed": why}
{"check": {...}}                     {"checked": exit status of `asyncflow check`}
{"ray": {...}}                       {"ray": "up"}, or {"failed": why}
{"run": {...}}                       {"driver": process id}, {"said": line}..., later {"ended": exit status}
{"interrupt": signal}                none: the signal goes to the run
{"owner": process id}                none: the run's process, on whatever host; its shared memory goes in the end
{"ping": 0}                          none; it says that the launcher is there
{"stop": 0}                          {"stopped": 0}; then it ends

Answers go to standard output behind `ANSWER`; every other line there is output of this host. Whatever way the launcher
goes, the agent stops what it has started: when standard input ends, or is silent for as long as `hello` allows.
Loads no Ray and no torch.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from mindspeed_asyncflow.service import cleanup, host_facts
from mindspeed_asyncflow.service.host_child import Child
from mindspeed_asyncflow.service.host_logs import LogTail
from mindspeed_asyncflow.service.inherited import OBJECT_STORE_BYTES, worker_environment

ANSWER = "\x1easyncflow "
BEAT_S = 2.0  # between two signs of life of either side
FIRST_S = 120.0  # for the first request
RAY_UP = "Ray runtime started"  # what `ray start` prints once the node has joined
RAY_LATE = "timed out during startup"  # and after 30 s, which it always gives its daemons: too little on a busy machine
RAY_TRIES = 3
RAY_STOP_S, DRIVER_STOP_S = 5.0, 25.0  # to end in order


class Agent:
    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # also filled by signals
        self._silence_s = FIRST_S
        self._writing = threading.Lock()
        self._mark = ""
        self._owner = 0
        self._scratch: Path | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._ray: Child | None = None
        self._driver: Child | None = None
        self._tail: LogTail | None = None

    # ---- both directions ---------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        """A line to the launcher. Where nobody reads any more, `_read` sees the end too."""
        with self._writing:
            try:
                print(line, flush=True)
            except OSError:
                self._inbox.put(None)

    def _answer(self, **content: Any) -> None:
        self._say(ANSWER + json.dumps(content))

    def _read(self) -> None:
        for line in sys.stdin:
            self._inbox.put(json.loads(line))
        self._inbox.put(None)

    def _beat(self) -> None:
        while True:
            self._answer(alive=0)
            time.sleep(BEAT_S)

    def serve(self) -> int:
        """Until the launcher stops it, or goes. Returns the exit status: 0 when it was stopped."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: self._inbox.put(None))
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()
        verbs: dict[str, Callable[[Any], None]] = {
            "hello": self._hello,
            "check": self._check,
            "ray": self._start_ray,
            "again": lambda content: self._try_ray(*content),  # from this process
            "run": self._run,
            "interrupt": self._interrupt,
            "owner": self._own,
            "ping": lambda content: None,
        }
        while True:
            try:
                request = self._inbox.get(timeout=self._silence_s)
            except queue.Empty:
                request = None
            if request is None:
                self._end()
                return 1
            [(verb, content)] = request.items()
            if verb == "stop":
                self._end()
                self._answer(stopped=0)
                return 0
            try:
                verbs[verb](content)
            except Exception as error:  # boundary: the launcher names this host and stops the others
                self._answer(failed=f"{verb}: {error}")

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _hello(self, told: dict[str, Any]) -> None:
        os.environ.update(told["environment"])
        self._silence_s = told["silence_s"]
        address = host_facts.own_address(told["address"], told["peers"])
        host_facts.check_shared(Path(told["shared"]), told["token"])
        os.environ.update(worker_environment(os.environ))
        os.environ.update(host_facts.without_proxy([address, *told["peers"]], os.environ))
        self._mark = cleanup.mark_environment()
        self._answer(ready={"address": address} | host_facts.facts())

    def _check(self, told: dict[str, Any]) -> None:
        os.environ.update(told["environment"])
        command = [sys.executable, "-m", "mindspeed_asyncflow", "check", *told["arguments"]]
        Child(command, self._say, name="check", ended=lambda status: self._answer(checked=status))

    def _start_ray(self, told: dict[str, Any]) -> None:
        """A head, or a node that joins the one at `told["join"]`."""
        for folder in (cleanup.SHM, Path(tempfile.gettempdir())):
            for name in cleanup.remove_stale(folder):
                self._say(f"removed what a dead run left: {name}")
        self._scratch = Path(tempfile.mkdtemp(prefix=cleanup.scratch_prefix()))
        self._reaper = cleanup.start_reaper(self._mark, self._scratch)  # it outlives this process
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={told['address']}", f"--temp-dir={self._scratch}", "--log-color=false"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--resources={json.dumps(told['resources'])}"]
        role = [f"--address={told['join']}"] if told["join"] else ["--head", "--include-dashboard=false"]

        self._tail = LogTail(self._scratch, self._say)
        self._try_ray([*command, *role, *told["arguments"]], RAY_TRIES)

    def _try_ray(self, command: list[str], tries: int) -> None:
        late = threading.Event()

        def seen(line: str) -> None:
            if RAY_UP in line:
                self._answer(ray="up")
            if RAY_LATE in line:
                late.set()

        def ended(status: int) -> None:
            if late.is_set() and tries > 1:
                self._say("ray: starting it again")
                cleanup.end_processes(cleanup.run_processes(self._mark, self._scratch, self._spared), grace_s=0.0)
                self._inbox.put({"again": (command, tries - 1)})
            else:
                self._answer(failed=f"its Ray has ended with status {status}")

        self._ray = Child(command, self._say, name="ray", seen=seen, ended=ended)

    @property
    def _spared(self) -> int:
        return 0 if self._reaper is None else self._reaper.pid

    def _run(self, told: dict[str, Any]) -> None:
        os.environ.update(told["environment"])
        command = [sys.executable, "-m", "mindspeed_asyncflow", "train", *told["arguments"]]
        self._driver = Child(
            command, lambda line: self._answer(said=line), ended=lambda status: self._answer(ended=status)
        )
        self._answer(driver=self._driver.pid)

    def _interrupt(self, number: int) -> None:
        if self._driver is not None:
            self._driver.signal(number)

    def _own(self, driver: int) -> None:
        self._owner = driver

    def _end(self) -> None:
        """Stop everything here."""
        if self._driver is not None:
            self._driver.stop(DRIVER_STOP_S)
        if self._reaper is None:
            return
        spare = self._spared
        files = cleanup.shared_files(cleanup.run_processes(self._mark, self._scratch, spare))
        if self._ray is not None:
            self._ray.stop(RAY_STOP_S)
        if killed := cleanup.end_processes(cleanup.run_processes(self._mark, self._scratch, spare)):
            self._say(f"had to be killed: {', '.join(killed)}")
        if self._owner:
            files |= set(cleanup.SHM.glob(f"asyncflow-{self._owner}-*"))
        for file in files - cleanup.shared_files(list(psutil.process_iter())):  # another run may have the same number
            file.unlink(missing_ok=True)
        if self._tail is not None:
            self._tail.finish()
        shutil.rmtree(self._scratch or "", ignore_errors=True)
        cleanup.stop_reaper(self._reaper)


if __name__ == "__main__":
    status = Agent().serve()
    sys.stdout.flush()
    os._exit(status)  # one thread still reads, another one beats
