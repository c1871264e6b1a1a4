"""What is written while a run goes on: metrics as JSON lines and to the trackers, and samples as text."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_asyncflow.observe.metrics import check_names
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.trackers import Trackers


class MetricsWriter:
    """One line of `metrics.jsonl` per call, on disk when `write` returns; the same to the trackers, which cannot fail
    it."""

    def __init__(self, folder: RunFolder, trackers: Trackers | None = None):
        self._folder, self._trackers = folder, trackers or Trackers({})
        self._open()

    def _open(self) -> None:
        self._file = open(self._folder.metrics, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step`: 0-based. Raises `MetricError` for a name outside the table. Not-finite values become null in JSON."""
        check_names(metrics)
        now = time.time()
        record: dict[str, float | int | None] = {"step": step, "time": round(now, 3)}
        for name, value in metrics.items():
            record[name] = float(value) if math.isfinite(value) else None
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self._trackers.write(step, now, metrics)

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Inside, the files may be changed; then they are written on."""
        self._file.close()
        self._trackers.pause()
        try:
            yield
        finally:
            self._open()

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            self._trackers.close()


class EvaluationsWriter:
    """Appends one line to `evaluations.jsonl` per evaluation; it is on disk when `write` returns."""

    def __init__(self, folder: RunFolder):
        self._path = folder.evaluations

    def write(self, record: Mapping[str, Any]) -> None:
        line = {"time": round(time.time(), 3), **record}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


@dataclass(frozen=True, slots=True)
class SampleText:
    """One answer as a reader sees it. `lag`: trainer version minus version of the oldest token."""

    version: int
    prompt: str
    answer: str
    reward: float
    truth: str
    lag: int
    issue: tuple[int, int] | None = None  # epoch and index of the prompt, as `asyncflow audit --prompt` wants them


class SamplesWriter:
    """Appends answers to `samples/step_000003.txt`."""

    def __init__(self, folder: RunFolder):
        self._folder = folder.samples
        self._folder.mkdir(exist_ok=True)

    def write(self, step: int, sample: SampleText) -> None:
        issue = "" if sample.issue is None else " | prompt {}:{}".format(*sample.issue)
        text = (
            f"--- step {step} | version {sample.version} | lag {sample.lag} | reward {sample.reward:g}{issue}\n"
            f"prompt: {_block(sample.prompt)}\nanswer: {_block(sample.answer)}\ntruth:  {_block(sample.truth)}\n\n"
        )
        with open(self._folder / f"step_{step:06d}.txt", "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


def _block(text: str) -> str:
    """Further lines are indented under the first, so that an answer cannot look like the next record."""
    return text.replace("\r\n", "\n").replace("\n", "\n        ")
