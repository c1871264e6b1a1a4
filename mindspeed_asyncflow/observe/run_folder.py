"""The folder that a run leaves behind. Only this file knows what is where in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_asyncflow.errors import ConfigError, PlatformError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. `create` makes a new folder; `RunFolder(path)` looks at an old one."""

    path: Path

    @classmethod
    def create(cls, base: Path | str, name: str, config_yaml: str) -> RunFolder:
        """Make `base/name-YYYYmmdd-HHMMSS[-n]` with the resolved config in it and point `base/latest` there.

        Raises `PlatformError` naming `run.folder` where this cannot be written.
        """
        return cls._new(base, name, lambda folder: folder._furnish(config_yaml))

    @classmethod
    def reserve(cls, base: Path | str, name: str) -> RunFolder:
        """As `create`, for a launcher: the run comes later with `create_at`, and finds only `logs` in it."""
        return cls._new(base, name, lambda folder: folder.logs.mkdir())

    @classmethod
    def _new(cls, base: Path | str, name: str, fill: Callable[[RunFolder], None]) -> RunFolder:
        base = Path(base)
        try:
            base.mkdir(parents=True, exist_ok=True)
            folder = cls(_unique(base, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"))
            fill(folder)
            _point_latest(base, folder.path.name)
        except OSError as error:
            raise PlatformError(
                f"cannot make a run folder in {base.absolute()}: {error.strerror or error}; set run.folder to a folder "
                "that can be written"
            ) from error
        return folder

    @property
    def is_run(self) -> bool:
        """Whether a run has begun here."""
        return self.config.is_file()

    def of_run(self) -> RunFolder:
        """Itself. Raises `ConfigError` that says what is there instead where no run has begun."""
        if not self.path.exists():
            here = "" if self.path.is_absolute() else " here"
            raise ConfigError(f"there is no {self.path}{here}: name a run folder")
        if not self.is_run or not self.config.stat().st_size:  # empty: as a full disk leaves it
            raise ConfigError(f"{self.path} is no run folder: it has no config.yaml, or an empty one")
        return self

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """For one driver at a time. Raises `ConfigError` where another one that lives has the folder."""
        with open(self.config, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"{self.path} is in use: another driver trains there") from error
            yield

    @property
    def held_here(self) -> bool:
        """Whether a driver on this node has the folder `locked`. Looks only: a driver that begins is not hindered."""
        try:
            inode = self.config.stat().st_ino
            locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
        except OSError:
            return False
        return any(f":{inode} " in line and "FLOCK" in line and "WRITE" in line for line in locks)

    @classmethod
    def create_at(cls, path: Path | str, config_yaml: str, checkpoint: Path | None = None) -> RunFolder:
        """Make exactly `path`, new or empty but for `logs`, without a `latest`. `checkpoint`: see `begun_from`.

        Raises `ConfigError` where it holds something or is a file, `PlatformError` where it cannot be written.
        """
        path = Path(path).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(found != cls(path).logs for found in path.iterdir()):
                raise ConfigError(f"{path} is not empty; give a new folder for the results of this run")
            folder = cls(path)
            folder._furnish(config_yaml, checkpoint)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"cannot make the run folder {path}: {error.strerror}") from error
        except OSError as error:
            raise PlatformError(f"cannot make the run folder {path}: {error.strerror or error}") from error
        return folder

    def be_latest(self, base: Path | str) -> None:
        """Point `base/latest` here, where this folder lies in `base`."""
        path = self.path.resolve()  # it may be named by way of `latest`
        if path.parent == Path(base).resolve():
            with contextlib.suppress(OSError):  # the run does not need it
                _point_latest(path.parent, path.name)

    def _furnish(self, config_yaml: str, checkpoint: Path | None = None) -> None:
        self.trace.mkdir()
        self.samples.mkdir()
        if checkpoint is not None:
            self._begun_from.write_text(json.dumps({"checkpoint": str(checkpoint)}), encoding="utf-8")
        self.config.write_text(config_yaml, encoding="utf-8")  # last: with it the run has begun

    @property
    def _begun_from(self) -> Path:
        return self.path / "begun_from.json"

    @property
    def begun_from(self) -> Path | None:
        """The checkpoint of another run that this one began with; None: it began at version 0."""
        try:
            return Path(json.loads(self._begun_from.read_text(encoding="utf-8"))["checkpoint"])
        except FileNotFoundError:
            return None

    @property
    def config(self) -> Path:
        """Resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per line and step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trackers(self) -> Path:
        """The run's id at each service that tracks it; what their libraries said is in the folder of the same name."""
        return self.path / "trackers.json"

    @property
    def trace(self) -> Path:
        """One event file per process, and `trace.json` once merged."""
        return self.path / "trace"

    @property
    def events(self) -> Path:
        """What happened in which order (`events.jsonl`) and what was trained, for `asyncflow replay`."""
        return self.path / "events"

    @property
    def ledger(self) -> Path:
        """What became of every prompt and sample, for `asyncflow audit` (SQLite)."""
        return self.path / "ledger.sqlite"

    @property
    def evaluations(self) -> Path:
        """One JSON object per line and evaluation, with the score of every answer."""
        return self.path / "evaluations.jsonl"

    @property
    def prompts(self) -> Path:
        """Prompts that a client has given, one JSON object per line, in their order."""
        return self.path / "prompts.jsonl"

    @property
    def owner(self) -> Path:
        """The tenant of a server whose run this is: the name, in one line."""
        return self.path / "owner"

    @property
    def samples(self) -> Path:
        """Readable answers, one text file per step."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        """The trained policy as a Hugging Face folder."""
        return self.path / "hf"

    def point_hf(self, target: Path) -> None:
        """`hf` names `target`, a folder of this run, from now on. Where that is not there `hf` stays as it is, unless
        what it names is gone too."""
        if target.is_dir():
            self.hf.unlink(missing_ok=True)
            self.hf.symlink_to(target.relative_to(self.path))
        elif self.hf.is_symlink() and not self.hf.exists():
            self.hf.unlink()

    def marks(self) -> dict[str, int]:
        """How long the files are that grow while a run goes on: bytes by name, for `cut_back`."""
        growing = [self.metrics, self.evaluations, self.events / "events.jsonl", *self.tensorboard.glob("*")]
        return {str(p.relative_to(self.path)): p.stat().st_size for p in growing if p.is_file()}

    def cut_back(self, marks: Mapping[str, int], step: int) -> None:
        """What was written after `marks()` goes, and what belongs to `step` (0-based) or later ones: a run does them
        again. Nobody may have the files of TensorBoard open."""
        for name, size in self.marks().items():
            kept = marks.get(name, 0)
            if not kept:
                (self.path / name).unlink() if name.startswith("tensorboard") else os.truncate(self.path / name, 0)
            elif size > kept:
                os.truncate(self.path / name, kept)
        for part in [*self.samples.glob("step_*"), *self.events.glob("step_*")]:
            if int(part.name.split(".")[0].split("_")[1]) >= step:
                part.unlink()
        for ended in (self.summary, self.report):
            ended.unlink(missing_ok=True)

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def simulated(self) -> Path:
        """What `asyncflow simulate` found; it is there from the begin of a simulation on, and no run has it."""
        return self.path / "result.json"

    @property
    def processes(self) -> Path:
        """Process id and node of every process while the run is on, see `service/process_table.py`."""
        return self.path / "processes.json"

    @property
    def dock(self) -> Path:
        """Addresses and secret of the dock while the run is on, readable by its owner only."""
        return self.path / "dock.json"

    @property
    def logs(self) -> Path:
        """Of a launch over several hosts: a file for each, and the host file with what the hosts said of themselves."""
        return self.path / "logs"

    @property
    def log(self) -> Path:
        """Full log of all processes."""
        return self.path / "log.txt"


def _unique(base: Path, stem: str) -> Path:
    for attempt in range(1, 1000):
        path = base / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path.absolute()
    raise FileExistsError(f"{stem}: 999 runs in one second")


def _point_latest(base: Path, target: str) -> None:
    """Switch the link in one step, so that a reader never sees it missing."""
    link = base / "latest"
    temporary = base / f".latest-{os.getpid()}-{target}"
    os.symlink(target, temporary)
    try:
        os.replace(temporary, link)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
