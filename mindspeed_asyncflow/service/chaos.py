"""A run under kills and freezes at random moments, seen from outside: what it takes to be back, and what stays behind.

start ─► a step ─► pause ─► blow ─► back: another process has the name, and a step has ended since ─► pause ─► ...
                             └─► the run ends: nothing of it may be left after 15 s ─► start with --resume auto ─► back

Knows the run by its folder only: `processes.json` says who is who, `metrics.jsonl` which step was the last.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import psutil

from mindspeed_asyncflow.errors import AsyncFlowError, DeadlineExceeded
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service.cleanup import SHM
from mindspeed_asyncflow.service.process_table import read_table

LOOK_S = 0.25
END_S = 15.0  # nothing of a run may be left so long after it has ended
PAUSE_S = 4.0  # at most, between being back and the next blow
FROZEN_S = 5.0  # at most; a driver is stopped for so long, and then goes on
STARTS = 3  # in a row, without a step
TAIL_BYTES = 65536
WRONG_SETTINGS = 2  # exit status


@dataclass(slots=True)
class Blow:
    name: str  # of the process
    how: str  # kill or freeze
    began: float = 0.0  # monotonic seconds
    end_s: float | None = None  # until nothing of the run was left; None: the run went on
    seconds: float | None = None  # until it was back; None: the run was over before

    @property
    def ended(self) -> bool:
        """The run ended because of it, and went on with --resume auto."""
        return self.end_s is not None

    @property
    def component(self) -> str:
        return self.name.rstrip("0123456789")


class Chaos:
    """`command(steps)`: the command line of the run up to that many steps, which goes on where it ended.

    `only`: components that may be struck; empty: all. `patience_s`: longest time without a step.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        folder: RunFolder,
        steps: int,
        seed: int,
        *,
        only: Sequence[str] = (),
        patience_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.command, self.folder, self.steps, self.say = command, folder, steps, say
        self.only, self.patience_s, self._random = tuple(only), patience_s, Random(seed)
        self.blows: list[Blow] = []
        self.ends = 0  # of the run, that were followed by a resume
        self.left_processes: list[str] = []
        self.left_files: list[str] = []
        self._turns: list[tuple[str, str]] = []  # (component, how) that are due before any comes again
        self._seen: set[psutil.Process] = set()
        self._starts = 0
        self._since = time.monotonic()  # of the last step or start
        self._last = ""
        self._child: subprocess.Popen[bytes] | None = None

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self, kills: int) -> None:
        """Strike so often, and let the run come to its end. Raises `AsyncFlowError` where it does not go on."""
        try:
            self._start()
            while len(self.blows) < kills:
                began = time.time()
                if self._until(partial(self._step_after, began)):
                    time.sleep(self._random.uniform(0, PAUSE_S))
                    self._strike()
                elif len(self.blows) < kills:
                    self.steps *= 2
                    self.say(f"the run is complete; it goes on to step {self.steps}")
                    self._start()
            self.say("all blows are through; waiting for the end of the run")
            self._until(lambda: False)
        finally:
            self._end()

    def _start(self) -> None:
        self._starts += 1
        if self._starts > STARTS:
            raise AsyncFlowError(
                f"the run ended {STARTS} times in a row without a step; its last words:\n{self._tail()}"
            )
        with open(self._output, "ab") as output:
            self._child = subprocess.Popen(self.command(self.steps), stdout=output, stderr=subprocess.STDOUT)
        self._seen, self._since = set(), time.monotonic()

    @property
    def _output(self) -> Path:
        return self.folder.logs / "chaos.txt"

    def _tail(self) -> str:
        return "\n".join(self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])

    def _until(self, done: Callable[[], bool]) -> bool:
        """Wait for `done`, with a resume whenever the run ends by a failure; False: it is complete before that."""
        while True:
            assert self._child is not None
            self._look()
            code = self._child.poll()
            if code is not None:
                self._account()
                if code == 0:
                    return False
                if code == WRONG_SETTINGS:
                    raise AsyncFlowError(f"the run refuses its settings; its last words:\n{self._tail()}")
                self.ends += 1
                if self.blows and self.blows[-1].seconds is None:
                    self.blows[-1].end_s = time.monotonic() - self.blows[-1].began
                self.say(f"the run has ended with exit status {code}; resuming")
                self._start()
            elif done():
                return True
            if time.monotonic() - self._since > self.patience_s:
                raise DeadlineExceeded(f"no step for {self.patience_s:g} s; last words of the run:\n{self._tail()}")
            time.sleep(LOOK_S)

    def _look(self) -> None:
        """Whom the run has started, and whether a step has ended since."""
        assert self._child is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen.update(psutil.Process(self._child.pid).children(recursive=True))
        for pid in self._table().values():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.add(psutil.Process(pid))
        if (last := self._last_line()) != self._last:
            self._last, self._since, self._starts = last, time.monotonic(), 0

    def _table(self) -> dict[str, int]:
        """Processes of the run that is on, by name; empty while only that of an earlier one is there."""
        assert self._child is not None
        found = read_table(self.folder.processes)
        if found.get("driver", (0, ""))[0] != self._child.pid:
            return {}
        return {name: pid for name, (pid, host) in found.items() if host == found["driver"][1]}

    def _last_line(self) -> str:
        try:
            with open(self.folder.metrics, "rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").split("\n")[:-1]
        except FileNotFoundError:
            return ""
        return lines[-1] if lines else ""

    def _step_after(self, moment: float) -> bool:
        """Whether a step has ended after `moment` (seconds since 1970, as in the metrics)."""
        with contextlib.suppress(ValueError, KeyError):
            return bool(json.loads(self._last_line())["time"] > moment)
        return False

    # ---- blows -------------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        """One blow, and the way back from it. Nothing where no process that may be struck is there in this moment."""
        found = self._choose()
        if found is None:
            return
        name, how, pid = found
        blow = Blow(name, how, time.monotonic())
        self.blows.append(blow)
        self.say(f"{how} {name} (process {pid})")
        self._hit(name, how, pid)
        back_at: list[float] = [time.time()] if name == "driver" and how == "freeze" else []

        def back() -> bool:
            now = self._table().get(name)
            if not back_at and now not in (None, pid):
                back_at.append(time.time())
            return bool(back_at) and self._step_after(back_at[0])

        if self._until(back):
            blow.seconds = time.monotonic() - blow.began
            self.say(f"{name} is back after {blow.seconds:.1f} s" + (" and a resume" if blow.ended else ""))

    def _choose(self) -> tuple[str, str, int] | None:
        """A component and how it is struck, each pair once before any comes again; then one of its processes."""
        there: dict[str, list[tuple[str, int]]] = {}
        table = self._table()
        known = {name.rstrip("0123456789") for name in table}
        if table and (strangers := set(self.only) - known):
            raise AsyncFlowError(f"--only {','.join(sorted(strangers))}: this run has {', '.join(sorted(known))}")
        for name, pid in sorted(table.items()):
            component = name.rstrip("0123456789")
            if psutil.pid_exists(pid) and (not self.only or component in self.only):
                there.setdefault(component, []).append((name, pid))
        if not there:
            return None
        if not any(component in there for component, _ in self._turns):
            self._turns = [(component, how) for component in there for how in ("kill", "freeze")]
            self._random.shuffle(self._turns)
        turn = next(turn for turn in self._turns if turn[0] in there)
        self._turns.remove(turn)
        name, pid = self._random.choice(there[turn[0]])
        return name, turn[1], pid

    def _hit(self, name: str, how: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            process = psutil.Process(pid)
            process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            if name == "driver" and how == "freeze":  # nobody replaces it; what waits for it must not mind
                time.sleep(self._random.uniform(1, FROZEN_S))
                process.send_signal(signal.SIGCONT)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _account(self) -> None:
        """The run has ended: what is left of it after its time is counted and removed."""
        assert self._child is not None
        _, left = psutil.wait_procs([p for p in self._seen if p.is_running()], timeout=END_S)
        left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        files = list(SHM.glob(f"asyncflow-{self._child.pid}-*"))
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.left_processes.append(f"{process.pid} {process.name()}")
                process.kill()
        for file in files:
            self.left_files.append(file.name)
            file.unlink(missing_ok=True)

    def _end(self) -> None:
        """Whatever happened here, the run does not go on alone."""
        if self._child is None or self._child.poll() is not None:
            return
        self._child.send_signal(signal.SIGCONT)
        self._child.terminate()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._account()


def train_command(config: str, folder: Path, overrides: Sequence[str]) -> Callable[[int], list[str]]:
    """Command lines for `Chaos`."""

    def command(steps: int) -> list[str]:
        settings = [word for override in (*overrides, f"trainer.steps={steps}") for word in ("--set", override)]
        where = ["--run-folder", str(folder), "--resume", "auto"]
        return [sys.executable, "-m", "mindspeed_asyncflow", "train", config, *where, *settings]

    return command
