"""What a run writes about itself, and where it shows its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mindspeed_asyncflow.config.machine import Machine
from mindspeed_asyncflow.config.section import Section

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import Config

TrackerName = Literal["jsonl", "tensorboard", "wandb", "swanlab", "mlflow"]
Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]


class ObserveConfig(Section):
    trackers: list[TrackerName] = Field(
        ["jsonl", "tensorboard"],
        description="Where metrics go, in any combination: jsonl (metrics.jsonl, always written), tensorboard, wandb, "
        "swanlab, mlflow.",
    )
    tensorboard: bool | None = Field(
        None, description="true or false: TensorBoard events or none, whatever observe.trackers says."
    )
    project: str = Field(
        "asyncflow", min_length=1, description="Project (W&B, SwanLab) or experiment (MLflow) that holds the run."
    )
    online: bool = Field(
        False,
        description="true: W&B, SwanLab and MLflow send to the services that they are logged in to or their own "
        "environment variables name; false: they write into the run folder and open no connection.",
    )
    trackers_python: str | None = Field(
        None,
        description="Python with the libraries of wandb, swanlab and mlflow, where it is not this one; see "
        "scripts/trackers.sh.",
    )
    trackers_wait_s: float = Field(
        10.0, gt=0, description="How long the end of a run waits for wandb, swanlab and mlflow to finish."
    )
    prometheus_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of an endpoint for Prometheus on 127.0.0.1 of the driver's node; 0: any free one, which the "
        "log names; null: none.",
    )
    trace: bool = Field(True, description="Write a Chrome trace of all processes.")
    samples_per_step: int = Field(2, ge=0, description="Answers per step written as text.")
    events: bool = Field(True, description="Record the order of events and what was trained, for `asyncflow replay`.")
    events_mb: int = Field(
        1024, ge=1, description="Most disk for what was trained, in MiB; steps beyond it cannot be replayed."
    )

    @property
    def beside(self) -> tuple[str, ...]:
        """Trackers beside metrics.jsonl, each once."""
        chosen = [name for name in dict.fromkeys(self.trackers) if name != "jsonl"]
        if self.tensorboard is False and "tensorboard" in chosen:
            chosen.remove("tensorboard")
        if self.tensorboard and "tensorboard" not in chosen:
            chosen.insert(0, "tensorboard")
        return tuple(chosen)


def findings(c: Config, machine: Machine) -> Iterator[Raw]:
    """A tracker that cannot work costs its own curves only, so none of this is an error."""
    o = c.observe
    for name in o.beside:
        elsewhere = o.trackers_python is not None and name != "tensorboard"
        if not elsewhere and not machine.has_module(name):
            yield (
                "warning",
                ("observe.trackers",),
                f"{name} is not installed here, the run goes on without it; install it (bash scripts/trackers.sh) and "
                "set observe.trackers_python, or leave it out",
            )
    if o.prometheus_port is not None and not machine.has_module("prometheus_client"):
        yield (
            "warning",
            ("observe.prometheus_port",),
            "prometheus_client is not installed here, the run goes on without its endpoint; install it or set null",
        )
    elif o.prometheus_port and not machine.port_is_free(o.prometheus_port):
        yield (
            "warning",
            ("observe.prometheus_port",),
            f"port {o.prometheus_port} is in use, the run goes on without its endpoint; take another one, or 0 for any "
            "free one",
        )
