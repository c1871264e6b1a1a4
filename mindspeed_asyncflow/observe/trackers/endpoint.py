"""The metrics of the newest step for Prometheus, over HTTP on this machine only."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.observe.table import METRICS, Metric
from mindspeed_asyncflow.observe.trackers.base import Tracker

ADDRESS = "127.0.0.1"


def exposed_name(metric: str) -> str:
    """`reward/mean` -> `asyncflow_reward_mean`; a family loses its star: `scorer/*` -> `asyncflow_scorer`."""
    return "asyncflow_" + re.sub(r"[^a-z0-9_]+", "_", metric.removesuffix("/*"))


class Endpoint(Tracker):
    """Serves `http://127.0.0.1:PORT/metrics`. Every row of the table is there with its definition as help text, with a
    value once a step has brought one; NaN is told as such."""

    def __init__(self, port: int, run: str, steps: int) -> None:
        """`run`: label of all values. `steps`: how many the run shall make. Raises OSError for a port in use."""
        from prometheus_client import CollectorRegistry, start_http_server

        self._run, self._steps = run, steps
        self._values: dict[str, float] = {}
        self._step, self._at = -1, 0.0
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = start_http_server(port, ADDRESS, registry)
        self.port: int = self._server.server_port
        get_logger("trackers").info("metrics for Prometheus: http://%s:%d/metrics", ADDRESS, self.port)

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        # In one assignment: another thread reads.
        self._values = {**self._values, **{name: float(value) for name, value in metrics.items()}}
        self._step, self._at = step, at

    def close(self, deadline: float) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks a collector for."""
        values = self._values
        own = (
            ("asyncflow_steps_done", "Optimizer steps made.", float(self._step + 1)),
            ("asyncflow_steps_wanted", "trainer.steps.", float(self._steps)),
            ("asyncflow_last_step_seconds", "When the newest step ended, seconds since 1970.", self._at or None),
        )
        for name, text, value in own:
            yield self._family(name, text, {} if value is None else {"": value})
        for metric in METRICS:
            yield self._of(metric, values)

    def _of(self, metric: Metric, values: Mapping[str, float]) -> Any:
        text = f"{metric.definition} Unit: {metric.unit}."
        if not metric.name.endswith("/*"):
            found = {"": values[metric.name]} if metric.name in values else {}
            return self._family(exposed_name(metric.name), text, found)
        stem = metric.name.removesuffix("*")
        members = {name.removeprefix(stem): value for name, value in values.items() if name.startswith(stem)}
        return self._family(exposed_name(metric.name), text, members, "name")

    def _family(self, name: str, text: str, values: Mapping[str, float], label: str = "") -> Any:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(name, text, labels=["run", *([label] if label else [])])
        for member, value in values.items():
            family.add_metric([self._run, *([member] if label else [])], value)
        return family
