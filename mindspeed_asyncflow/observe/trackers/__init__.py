"""Where metrics go beside `metrics.jsonl`: any combination of trackers, none of which can disturb another or the run.

TensorBoard's events and the endpoint for Prometheus live in the driver. W&B, SwanLab and MLflow each have a helper
process (`remote.py`, `child.py`): what they import, print, wait for or break stays there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.trackers.base import Tracker
from mindspeed_asyncflow.observe.trackers.endpoint import Endpoint
from mindspeed_asyncflow.observe.trackers.events import EventFiles
from mindspeed_asyncflow.observe.trackers.remote import Helper, Introduction


class Trackers:
    """Several trackers. One that fails is named in one warning and gets nothing any more."""

    def __init__(self, openers: Mapping[str, Callable[[], Tracker]], wait_s: float = 10.0) -> None:
        """`openers`: what opens each, by name. `wait_s`: how long `close` may take over all of them."""
        self._wait_s = wait_s
        self._open: dict[str, Tracker] = {}
        for name, opener in openers.items():
            try:
                self._open[name] = opener()
            except Exception as error:  # boundary: libraries of others; the run goes on without this one
                _warn(name, error)

    @property
    def names(self) -> tuple[str, ...]:
        """Those that work so far."""
        return tuple(self._open)

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.write(step, at, metrics))

    def pause(self) -> None:
        self._each(lambda tracker: tracker.pause())

    def close(self) -> None:
        self._each(lambda tracker: tracker.finish())
        deadline = time.monotonic() + self._wait_s
        self._each(lambda tracker: tracker.close(deadline))
        self._open.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                act(tracker)
            except Exception as error:  # boundary, as above
                del self._open[name]
                _warn(name, error)


def open_trackers(config: Config, folder: RunFolder) -> Trackers:
    """Those of `config.observe`. To be called before the processes of the run are marked as such: the helpers are not
    among those that are killed at its end."""
    o, run = config.observe, folder.path.name
    settings = config.model_dump(mode="json")

    def opener(name: str) -> Callable[[], Tracker]:
        if name == "tensorboard":
            return lambda: EventFiles(folder.tensorboard)
        told = Introduction(name, str(folder.path), o.project, run, settings, o.online)
        return lambda: Helper(told, folder.trackers, o.trackers_python)

    openers = {name: opener(name) for name in o.beside}
    if (port := o.prometheus_port) is not None:
        openers["prometheus"] = lambda: Endpoint(port, run, config.trainer.steps)
    return Trackers(openers, o.trackers_wait_s)


def _warn(name: str, error: Exception) -> None:
    get_logger("trackers").warning(
        "%s gets no metrics any more; the run goes on, and metrics.jsonl has them all: %s",
        name,
        str(error) or type(error).__name__,
    )
