"""W&B, SwanLab and MLflow, each behind the same three calls. Only helper processes import this file.

Steps are numbered as in `metrics.jsonl`. A run that went back to a checkpoint writes some of them again: SwanLab then
keeps the newer value, W&B and MLflow keep both.
"""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

MOST_PARAMETER = 500  # characters of a parameter that every MLflow store takes


class Service(Protocol):
    id: str  # of the run, at the service
    place: str  # where a user finds it, in words
    warning: str  # what a user should know at the start; mostly empty

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """`told`: `Introduction` as a mapping, and `id`, empty for a run that is new there."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        import wandb

        def begin(mode: str) -> Any:
            return wandb.init(
                project=told["project"],
                name=told["run"],
                id=told["id"] or uuid.uuid4().hex[:8],
                dir=told["folder"],
                config=dict(told["settings"]),
                mode=mode,
                resume="allow",
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
                ),
            )

        self._run, online, self.warning = online_or_not(told["online"], lambda on: begin("online" if on else "offline"))
        self._run.define_metric("step")  # W&B's own count of steps only grows
        self._run.define_metric("*", step_metric="step")
        self.id = str(self._run.id)
        self.place = str(self._run.url) if online else f"wandb sync {Path(self._run.dir).parent}"

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    def __init__(self, told: Mapping[str, Any]) -> None:
        import swanlab

        self._swanlab = swanlab
        folder = Path(told["folder"]) / "swanlab"
        # Its local dashboard is a package of its own; without it the same files are written, to be sent later.
        here = "local" if importlib.util.find_spec("swanboard") is not None else "offline"
        self.id = told["id"] or uuid.uuid4().hex[:8]

        def begin(online: bool) -> Any:
            return swanlab.init(
                project=told["project"],
                name=told["run"],
                id=self.id,
                resume="allow",
                log_dir=str(folder),
                mode="online" if online else here,
                config=dict(told["settings"]),
            )

        _, online, self.warning = online_or_not(told["online"], begin)
        self.place = "online" if online else f"swanlab {'watch' if here == 'local' else 'sync'} {folder}"

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class MLflow:
    def __init__(self, told: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self.warning, uri = Metric, "", None
        if told["online"] and not mlflow.is_tracking_uri_set():
            self.warning = "written into the run folder, since MLFLOW_TRACKING_URI names no server"
        if not told["online"] or self.warning:
            from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE

            MLFLOW_ALLOW_FILE_STORE.set(True)
            uri = (Path(told["folder"]).absolute() / "mlruns").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        if told["id"]:
            self._client.update_run(told["id"], status="RUNNING")
            self.id = told["id"]
        else:
            experiment = self._client.get_experiment_by_name(told["project"])
            number = experiment.experiment_id if experiment else self._client.create_experiment(told["project"])
            self.id = self._client.create_run(number, run_name=told["run"]).info.run_id
            params = [Param(key, str(value)[:MOST_PARAMETER]) for key, value in flat(told["settings"]).items()]
            for start in range(0, len(params), 100):
                self._client.log_batch(self.id, params=params[start : start + 100])
        self.place = f"run {self.id} in {mlflow.get_tracking_uri() if uri is None else uri}"

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        entries = [self._metric(name, value, int(at * 1000), step) for name, value in metrics.items()]
        for start in range(0, len(entries), 1000):
            self._client.log_batch(self.id, metrics=entries[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self.id)


def online_or_not(wanted: bool, begin: Callable[[bool], Any]) -> tuple[Any, bool, str]:
    """What `begin` gives, whether that is online, and a warning. Without login or connection all is kept here."""
    if not wanted:
        return begin(False), False, ""
    try:
        return begin(True), True, ""
    except Exception as error:  # each library has errors of its own
        return begin(False), False, f"written into the run folder, since {' '.join(str(error).split())[:200]}"


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


SERVICES: dict[str, Callable[[Mapping[str, Any]], Service]] = {"wandb": Wandb, "swanlab": SwanLab, "mlflow": MLflow}
