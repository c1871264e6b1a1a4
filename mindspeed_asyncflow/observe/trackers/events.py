"""Event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.observe.trackers.base import Tracker


class EventFiles(Tracker):
    """One TensorBoard step per write, on disk when `write` returns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._begin()

    def _begin(self) -> None:
        # TensorBoard's own writer: torch.utils.tensorboard would load torch into the driver.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._file = EventFileWriter(str(self._folder))

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._file is None:
            self._begin()
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._file.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        self._file.flush()

    def pause(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self, deadline: float) -> None:
        self.pause()
