"""Where a run begins: in a new folder, or in that of an earlier run at one of its checkpoints."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
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
    undo: bool = False  # the checkpoint was named by the user: later ones of the folder are removed

    def __str__(self) -> str:
        if self.checkpoint is not None:
            return f"going on from {self.checkpoint}"
        return "it has no checkpoint: beginning again at version 0" if self.again else ""


@contextlib.contextmanager
def begin(config: Config, run_folder: Path | None, resume: str = AUTO) -> Iterator[Start]:
    """`choose`, in a folder that no other driver has from before its checkpoints are looked at until the end. Raises
    `ConfigError` too where another one has it."""
    with contextlib.ExitStack() as held:
        folder = _folder(run_folder, _named(resume))
        if there := folder is not None and folder.is_run:
            held.enter_context(folder.locked())
        start = choose(config, run_folder, resume)
        if not there and not start.complete:
            held.enter_context(start.folder.locked())
        if not start.complete:
            start.folder.be_latest(config.run.folder)
        yield start


def choose(config: Config, run_folder: Path | None, resume: str = AUTO) -> Start:
    """`resume` as of `asyncflow train`: auto, never, or the folder of a checkpoint. Makes the folder where it is new.

    Raises ConfigError for a folder that holds something else, or a run with other settings; CheckpointError where the
    checkpoint, or every one of the run, is damaged.
    """
    named = _named(resume)
    folder = _folder(run_folder, named)
    if folder is None:
        return Start(RunFolder.create(config.run.folder, config.run.name, dump_resolved(config)))
    own = named is not None and _same(named.parent, folder.checkpoints)
    same = named is None or (folder.begun_from is not None and _same(named, folder.begun_from))  # the command again
    if resume == NEVER or not folder.is_run or not (own or same):
        return _new(config, folder, named)
    if own and named is not None:
        checkpoint: Path | None = _whole(folder.checkpoints / named.name)
    else:
        checkpoint = newest(folder)
    _refuse_other_settings(config, folder.config if checkpoint is None else checkpoint / CONFIG)
    complete = _complete(config, checkpoint) if _has_ended(folder) else ""
    return Start(folder, True, checkpoint, complete, undo=own)


def newest(folder: RunFolder) -> Path | None:
    """Where the run of `folder` goes on: its newest whole checkpoint, or else that of another run which it began with;
    None: at version 0. Raises `CheckpointError` where it has such, and none is whole."""
    found = checkpoints.newest_complete(folder.checkpoints)
    if found is None and (found := folder.begun_from) is not None:
        try:
            checkpoints.verify(found)
        except CheckpointError as error:
            raise CheckpointError(
                f"{folder.path} began with a checkpoint of another run, and has no whole one of its own: {error}"
            ) from error
    if found is None and any(folder.checkpoints.glob("step_*")):
        raise CheckpointError(
            f"no checkpoint in {folder.checkpoints} is whole: mend one, or give a new folder with --run-folder"
        )
    return found


def _named(resume: str) -> Path | None:
    """The checkpoint that the user names, perhaps as `latest`."""
    if resume in (AUTO, NEVER):
        return None
    named = Path(resume).absolute()
    return named.parent / named.readlink() if named.is_symlink() else named


def _whole(named: Path) -> Path:
    """What the user named, if it is a whole checkpoint."""
    if not named.is_dir():
        raise ConfigError(
            f"there is no {named}: --resume takes auto, never, or the folder of a checkpoint, RUN/checkpoints/step_N"
        )
    if RunFolder(named).checkpoints.is_dir():
        raise ConfigError(f"{named} is a run, no checkpoint: --run-folder {named} goes on from its newest one")
    checkpoints.verify(named)
    return named


def _folder(run_folder: Path | None, named: Path | None) -> RunFolder | None:
    """None: a dated one is made."""
    path = run_folder if run_folder is not None or named is None else named.parent.parent
    return None if path is None else RunFolder(Path(path).absolute())


def _same(one: Path, other: Path) -> bool:
    """Also by way of links."""
    return one.resolve() == other.resolve()


def _new(config: Config, folder: RunFolder, named: Path | None) -> Start:
    """A run in a folder that has none, perhaps from a checkpoint of another run."""
    if named is not None:
        _whole(named)
        _refuse_other_settings(config, named / CONFIG)
    complete = _complete(config, named)
    if not complete:
        RunFolder.create_at(folder.path, dump_resolved(config), named)
    return Start(folder, named is not None, named, complete)


def _refuse_other_settings(config: Config, before: Path) -> None:
    if other := changed(load_config(before), config):
        raise ConfigError(
            f"the run of {before} has other settings, and these may not change on its way:\n  "
            + "\n  ".join(other)
            + "\nset them as they were, or begin a new run in a new folder"
        )


def _has_ended(folder: RunFolder) -> bool:
    """Whether the run has come to its end, with the evaluation that follows its last checkpoint."""
    try:
        return not json.loads(folder.summary.read_text(encoding="utf-8"))["error"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _complete(config: Config, checkpoint: Path | None) -> str:
    if checkpoint is None:
        return ""
    found = read_state(checkpoint)
    version, steps = found["version"], config.trainer.steps
    if version >= steps:
        return f"{version} steps are trained, and trainer.steps is {steps}"
    if _data_is_used_up(found, config):
        if found["stream"].get("client"):
            return f"the client's prompts ended after {version} steps"
        return f"the data ended after {version} steps (data.epochs)"
    return ""


def _data_is_used_up(found: Mapping[str, Any], config: Config) -> bool:
    stream, run = found["stream"], found["run"]
    if stream.get("client"):
        given = stream["exhausted"]
    else:
        given = stream["position"] >= stream["batches_per_epoch"] * config.data.epochs
    return bool(given and not run["book"]["groups"] and not run["feeder"]["left"])
