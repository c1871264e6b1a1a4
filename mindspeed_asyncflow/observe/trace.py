"""Spans of all processes, each process in its own file, joined into one Chrome trace (chrome://tracing, Perfetto).

The first line of `trace/<process>-<pid>.jsonl` names the process; each further line is the list of events of about one
second, since one list is much cheaper to encode than many lines. An event is `[kind, lane, name, start_us, dur_us,
args]`. Times are microseconds of the epoch from a clock that never runs backwards inside a process.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_asyncflow.errors import MetricError

FLUSH_S = 1.0
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=str).encode

_FIELDS = ("kind", "lane", "name", "start_us", "dur_us", "args")
Event = tuple[str, str, str, int, int, dict[str, Any]]  # kind X|i|C, lane, name, start ns, duration ns, args


class _Span:
    __slots__ = ("args", "lane", "name", "start", "tracer")

    def __init__(self, tracer: Tracer, name: str, lane: str, args: dict[str, Any]):
        self.tracer = tracer
        self.name = name
        self.lane = lane
        self.args = args

    def __enter__(self) -> _Span:
        self.start = self.tracer.clock_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.tracer._add("X", self.lane, self.name, self.start, self.tracer.clock_ns(), self.args)


class _NoSpan:
    __slots__ = ()

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(self, *_: object) -> None:
        return None


_NO_SPAN = _NoSpan()


class Tracer:
    """Events of one process. Thread-safe; a span costs about a microsecond, writing happens once a second."""

    def __init__(
        self,
        folder: Path | str,
        process: str,
        enabled: bool = True,
        clock_ns: Callable[[], int] | None = None,
        flush_s: float = FLUSH_S,
    ):
        """`folder`: the run's `trace/`. `process`: name shown for this process, e.g. `trainer0`. `clock_ns`: virtual
        time that begins at 0 (default: the real time of day), after which each `flush_s` the file is written."""
        self.enabled = enabled
        self.process = process
        self.clock_ns = clock_ns or time.perf_counter_ns
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._epoch_ns = 0 if clock_ns else time.time_ns() - time.perf_counter_ns()
        self._flush_ns = int(flush_s * 1e9)
        self._flush_at = self.clock_ns() + self._flush_ns
        self._file: int | None = None
        if enabled:
            safe = re.sub(r"[^A-Za-z0-9_.-]", "_", process)
            path = Path(folder) / f"{safe}-{os.getpid()}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._write(_encode({"process": process, "pid": os.getpid()}) + "\n")

    def span(self, name: str, lane: str = "main", **args: Any) -> _Span | _NoSpan:
        """`with tracer.span("train/forward_backward", lane="trainer0", step=3): ...`"""
        return _Span(self, name, lane, args) if self.enabled else _NO_SPAN

    def instant(self, name: str, lane: str = "main", **args: Any) -> None:
        """A moment without length."""
        if self.enabled:
            now = self.clock_ns()
            self._add("i", lane, name, now, now, args)

    def counter(self, name: str, **values: float) -> None:
        """A curve: `tracer.counter("queue", rollout=12, train=3)`."""
        if self.enabled:
            now = self.clock_ns()
            self._add("C", "", name, now, now, values)

    def flush(self) -> None:
        with self._lock:
            events, self._events = self._events, []
            self._flush_at = self.clock_ns() + self._flush_ns
            if events and self._file is not None:
                base = self._epoch_ns
                self._write(
                    _encode(
                        [
                            (kind, lane, name, (start + base) // 1000, dur // 1000, args)
                            for kind, lane, name, start, dur, args in events
                        ]
                    )
                    + "\n"
                )

    def close(self) -> None:
        """Write what is left; later events are ignored."""
        self.flush()
        self.enabled = False
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _add(self, kind: str, lane: str, name: str, start: int, end: int, args: dict[str, Any]) -> None:
        with self._lock:
            self._events.append((kind, lane, name, start, end - start, args))
        if end > self._flush_at:
            self.flush()

    def _write(self, text: str) -> None:
        assert self._file is not None
        data = text.encode()
        while data:
            data = data[os.write(self._file, data) :]


_tracer = Tracer("", "unset", enabled=False)


def configure(folder: Path | str, process: str, enabled: bool = True, **how: Any) -> Tracer:
    """Make the tracer of this process, closing an earlier one. `how`: as `Tracer` takes it."""
    global _tracer
    _tracer.close()
    _tracer = Tracer(folder, process, enabled, **how)
    return _tracer


def get_tracer() -> Tracer:
    """The tracer of this process; one that records nothing until `configure` is called."""
    return _tracer


def read_events(folder: Path | str) -> list[dict[str, Any]]:
    """All events under `folder`, oldest first: process, kind, lane, name, start_us, dur_us, args.

    A last line cut off by a killed process is left out; a broken line elsewhere raises `MetricError`.
    """
    events: list[dict[str, Any]] = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        process = path.stem
        for number, line in enumerate(lines):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                if number == len(lines) - 1:
                    continue
                raise MetricError(f"{path}:{number + 1} holds no trace events: {error}") from error
            if isinstance(record, dict):
                process = record["process"]
                continue
            origin = {"process": process, "file": path.stem}
            events += [origin | dict(zip(_FIELDS, event)) for event in record]
    return sorted(events, key=lambda e: (e["start_us"], -e["dur_us"]))


def merge_traces(folder: Path | str) -> Path:
    """Write `trace.json` (Chrome trace format) from the files of all processes in `folder`.

    Lanes become named threads. Spans of one lane that overlap without nesting, as concurrent requests do, are put on
    further threads `lane (2)`, ..., since the viewers need nested spans.
    """
    folder = Path(folder)
    out: list[dict[str, Any]] = []
    pids: dict[str, int] = {}
    tids: dict[tuple[int, str], int] = {}
    open_ends: dict[tuple[int, str], list[list[int]]] = {}
    for event in read_events(folder):
        pid = pids.get(event["file"])
        if pid is None:
            pid = pids[event["file"]] = len(pids) + 1
            out.append(_name("process_name", pid, 0, event["process"]))
        record = {
            "ph": event["kind"],
            "name": event["name"],
            "pid": pid,
            "ts": event["start_us"],
            "args": event["args"],
        }
        if event["kind"] == "C":
            out.append(record)
            continue
        lane = event["lane"]
        if event["kind"] == "X":
            level = sub_lane(open_ends.setdefault((pid, lane), []), event["start_us"], event["dur_us"])
            lane = lane if level == 0 else f"{lane} ({level + 1})"
            record["dur"] = event["dur_us"]
        else:
            record["s"] = "t"
        tid = tids.get((pid, lane))
        if tid is None:
            tid = tids[(pid, lane)] = len(tids) + 1
            out.append(_name("thread_name", pid, tid, lane))
        out.append(record | {"tid": tid})
    path = folder / "trace.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"traceEvents": out, "displayTimeUnit": "ms"}), encoding="utf-8")
    os.replace(temporary, path)
    return path


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def sub_lane(levels: list[list[int]], start: int, dur: int) -> int:
    """Index of the first stack of open span ends in `levels` into which [start, start + dur) nests; adds it there.

    Spans must come in the order of `read_events`.
    """
    for index, stack in enumerate(levels):
        while stack and stack[-1] <= start:
            stack.pop()
        if not stack or start + dur <= stack[-1]:
            stack.append(start + dur)
            return index
    levels.append([start + dur])
    return len(levels) - 1
