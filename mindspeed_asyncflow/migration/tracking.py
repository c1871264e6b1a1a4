"""Where other systems send metrics, as `observe.trackers`."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_asyncflow.migration.foreign import Foreign
from mindspeed_asyncflow.migration.table import Outcome, shown

OURS = ("tensorboard", "wandb", "swanlab", "mlflow")
ALWAYS = ("console", "file")  # the terminal and metrics.jsonl
SERVICES = ("wandb", "swanlab", "mlflow")
_AREAL_ONLINE = ("online", "shared", "cloud")


def take_verl(file: Foreign, out: Outcome) -> None:
    names = file.get("trainer.logger")
    if names is not None:
        _take(names if isinstance(names, list) else [names], "trainer.logger", True, out)
    _project(file, ("trainer.project_name",), out)


def take_mindspeed_rl(file: Foreign, out: Outcome) -> None:
    used = {name: file.get(f"rl_config.use_{name}") for name in ("tensorboard", "wandb", "swanlab")}
    if any(value is not None for value in used.values()):
        named = [f"rl_config.use_{name}" for name, value in used.items() if value is not None]
        here = file.get("rl_config.swanlab_mode", "cloud") in ("local", "offline", "disabled") and not used["wandb"]
        _take([name for name, value in used.items() if value is True], ", ".join(named), not here, out)
    _project(file, ("rl_config.wandb_project", "rl_config.swanlab_project"), out)


def take_areal(file: Foreign, out: Outcome) -> None:
    modes = {name: file.get(f"stats_logger.{name}.mode", "disabled") for name in ("wandb", "swanlab")}
    names = [name for name, mode in modes.items() if mode != "disabled"]
    if file.get("stats_logger.tensorboard.path"):
        names.insert(0, "tensorboard")
    if names:
        online = any(mode in _AREAL_ONLINE for mode in modes.values())
        _take(names, "stats_logger", online, out)
    _project(file, ("stats_logger.wandb.project", "stats_logger.swanlab.project"), out)


def _take(names: Iterable[object], key: str, online: bool, out: Outcome) -> None:
    names = [str(name) for name in names]
    chosen = [name for name in OURS if name in names]
    out.put("observe.trackers", ["jsonl", *chosen], f"from {key}")
    if online and set(chosen) & set(SERVICES):
        out.put("observe.online", True, f"the services of {key} are reached over the network")
        text = (
            "their libraries must be there: bash scripts/trackers.sh, and observe.trackers_python (docs/observing.md)"
        )
        out.undecided.append(("observe.trackers_python", text))
    for name in names:
        if name not in (*OURS, *ALWAYS):
            out.lost.append((f"{key}: {shown(name)}", f"observe.trackers knows {', '.join(OURS)}"))


def _project(file: Foreign, keys: tuple[str, ...], out: Outcome) -> None:
    """The first one that is given."""
    for key in keys:
        value = file.get(key)
        if isinstance(value, str) and value and "observe.project" not in out.settings:
            out.put("observe.project", value, f"from {key}")
