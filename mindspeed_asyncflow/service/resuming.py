"""Where a run begins: in a new folder, or in that of an earlier run at one of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.config.checkpoint import changed
from mindspeed_asyncflow.config.load import dump_resolved, load_config
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import CheckpointError, ConfigError
from mindspeed_asyncflow.observe import checkpoints
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service.saving import CONFIG, read_state

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True, slots=True)
class Start:
    folder: RunFolder
    again: bool = False  # the folder holds a run, which goes on, or begins anew where it has no checkpoint
    checkpoint: Path | None = None
    complete: str = ""  # why nothing is left to be done; empty: there is

    def __str__(self) -> str:
        if self.checkpoint is not None:
            return f"going on from {self.checkpoint}"
        return "it has no checkpoint: beginning again at version 0" if self.again else ""


def choose(config: Config, run_folder: Path | None, resume: str = AUTO) -> Start:
    """`resume` as of `asyncflow train`: auto, never, or the folder of a checkpoint. Makes the folder where it is new.

    Raises ConfigError for a folder that holds something else, or a run with other settings; CheckpointError where the
    checkpoint, or every one of the run, is damaged.
    """
    checkpoint = None
    if resume not in (AUTO, NEVER):
        checkpoint = Path(resume).absolute()
        checkpoints.verify(checkpoint)
        run_folder = run_folder or checkpoint.parent.parent
    if run_folder is None:
        return Start(RunFolder.create(config.run.folder, config.run.name, dump_resolved(config)))
    folder = RunFolder(Path(run_folder).absolute())
    own = checkpoint is None or checkpoint.parent == folder.checkpoints
    if resume == NEVER or not folder.is_run or not own:
        _refuse_other_settings(config, checkpoint / CONFIG if checkpoint else None)
        folder = RunFolder.create_at(folder.path, dump_resolved(config))
        return Start(folder, checkpoint is not None, checkpoint, _complete(config, checkpoint))
    if checkpoint is None:
        checkpoint = checkpoints.newest_complete(folder.checkpoints)
        if checkpoint is None and any(folder.checkpoints.glob("step_*")):
            raise CheckpointError(
                f"no checkpoint in {folder.checkpoints} is whole: mend one, or give a new folder with --run-folder"
            )
    _refuse_other_settings(config, folder.config if checkpoint is None else checkpoint / CONFIG)
    return Start(folder, True, checkpoint, _complete(config, checkpoint))


def _refuse_other_settings(config: Config, before: Path | None) -> None:
    if before is None:
        return
    if other := changed(load_config(before), config):
        raise ConfigError(
            f"the run of {before} has other settings, and these may not change on its way:\n  "
            + "\n  ".join(other)
            + "\nset them as they were, or begin a new run in a new folder"
        )


def _complete(config: Config, checkpoint: Path | None) -> str:
    if checkpoint is None:
        return ""
    found = read_state(checkpoint)
    version, steps = found["version"], config.trainer.steps
    if version >= steps:
        return f"{version} of {steps} steps are trained (trainer.steps)"
    if _data_is_used_up(found, config):
        return f"the data ended after {version} steps (data.epochs)"
    return ""


def _data_is_used_up(found: Mapping[str, Any], config: Config) -> bool:
    stream, run = found["stream"], found["run"]
    given = stream["position"] >= stream["batches_per_epoch"] * config.data.epochs
    return bool(given and not run["book"]["groups"] and not run["feeder"]["left"])
