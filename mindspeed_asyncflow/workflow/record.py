"""What a run recorded, read back: the chunks and optimizer steps that made each version."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.config.load import load_config
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError, RecordError
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.workflow.events import FORMAT, digest_of
from mindspeed_asyncflow.workflow.sample_log import file_of, is_recorded
from mindspeed_asyncflow.workflow.train_worker import ChunkRules


@dataclass(frozen=True, slots=True)
class Chunk:
    """One call of `TrainWorker.train`; rows are (group, member)."""

    plan: list[list[list[list[int]]]]  # [replica][micro-batch][row]
    rules: ChunkRules
    sums: list[dict[str, float | str]]  # [replica]


@dataclass(frozen=True, slots=True)
class Step:
    """What made version `version`."""

    version: int
    chunks: list[Chunk]
    tokens: int
    samples: int
    optim: dict[str, Any]  # as `events.optim_fields`


@dataclass(slots=True)
class Record:
    config: str  # digest of the resolved settings
    surroundings: dict[str, Any]
    published: dict[int, dict[str, Any]] = field(default_factory=dict)  # by version, as `events.manifest_fields`
    steps: list[Step] = field(default_factory=list)  # those whose version was published, from the first one on
    torn: bool = False  # the last line is not whole
    made: int = 0  # steps that the run says it made; 0: it says nothing
    ended: bool = True  # the run wrote its summary; False: its driver was killed, or it still goes on
    damage: str = ""  # what is missing that the run had recorded, in words; empty: nothing

    def extent(self) -> str:
        """In words, how the record ends where it is not the record of a whole run; empty: it is."""
        there = len(self.steps)
        end = f"the record ends in the middle of step {there + 1}" if self.torn else ""
        made = f"the run made {self.made} steps" if self.made > there else ""
        killed = "" if self.ended else "the run wrote no summary, as when its driver is killed"
        return "; ".join(part for part in (end, made, killed) if part)


def open_run(run: Path) -> tuple[Config, Record, int]:
    """Settings, record and number of steps that can be repeated of the run in the folder `run`; at least one, or none
    where `record.damage` says why.

    Raises ConfigError for a folder that is no run, has no record, or has other settings than those that were recorded;
    RecordError as `read_record`.
    """
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.yaml")
    events = folder.events / "events.jsonl"
    if not events.is_file():
        raise ConfigError(f"{run} has no record of events: they are recorded where observe.events is true")
    config, record = load_config(folder.config), read_record(events)
    if digest_of(folder.config.read_text(encoding="utf-8")) != record.config:
        raise ConfigError(f"{folder.config} was changed after the run had begun: the record does not belong to it")
    record.made, record.ended = _steps_made(folder), folder.summary.is_file()
    there = recorded_steps(record, folder.events, config.trainer.data_parallel)
    record.damage = _hole(record, folder.events, config.trainer.data_parallel)
    # A run that has written its summary had closed its record, at most one version behind.
    if not record.damage and record.ended and record.made > len(record.steps) + (not record.torn):
        record.damage = record.extent()
    if not there and not record.damage:
        raise ConfigError(f"no step of {run} is recorded with its samples (observe.events_mb)")
    return config, record, there


def recorded_steps(record: Record, samples: Path, replicas: int) -> int:
    """Steps from the first one on whose samples are there."""
    for count, step in enumerate(record.steps):
        if not is_recorded(samples, step.version - 1, replicas):
            return count
    return len(record.steps)


def _hole(record: Record, samples: Path, replicas: int) -> str:
    """The first file of samples that is missing although the same replica recorded a later step; empty: none."""
    for replica in range(replicas):
        files = [file_of(samples, step.version - 1, replica) for step in record.steps]
        there = [file.is_file() for file in files]
        if False in there and True in there[there.index(False) :]:
            return f"{files[there.index(False)]} is missing, and samples of later steps are there"
    return ""


def _steps_made(folder: RunFolder) -> int:
    """As the summary says; of a run without one, as its metrics do. 0: neither is there."""
    try:
        return int(json.loads(folder.summary.read_text(encoding="utf-8"))["steps"])
    except FileNotFoundError:
        return folder.metrics.read_bytes().count(b"\n") if folder.metrics.is_file() else 0
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{folder.summary} is no summary of a run: {error!r}") from error


def read_record(path: Path) -> Record:
    """Raises RecordError where lines are missing or no events, and for a run that did not begin at version 0."""
    record: Record | None = None
    chunks: dict[int, list[Chunk]] = {}
    finished: dict[int, Step] = {}
    torn = False
    for number, event in _lines(path):
        if event is None:
            torn = True
            continue
        try:
            kind = event["kind"]
            if kind == "begun":
                if record is not None:
                    raise RecordError(f"{path}: the run was begun twice; only runs from version 0 on can be repeated")
                record = _begun(path, event)
            elif kind == "resumed":
                if record is not None:  # what it undid has left the file; it may have other sizes
                    record.config = event["config"]
            elif record is None:
                raise RecordError(f"{path} does not begin with the begin of a run")
            elif kind == "trained":
                chunk = Chunk(event["plan"], ChunkRules(event["step"], **event["rules"]), event["sums"])
                chunks.setdefault(event["step"], []).append(chunk)
            elif kind == "finished":
                version = event["version"]
                optim = {name: event[name] for name in ("applied", "grad_norm", "lr")}
                finished[version] = Step(version, chunks.pop(version - 1, []), event["tokens"], event["samples"], optim)
            elif kind == "published":
                record.published[event["version"]] = {n: event[n] for n in ("fingerprint", "checksums")}
        except (KeyError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: no event of this program ({error!r})") from error
    if record is None or 0 not in record.published:
        raise RecordError(f"{path} ends before the first version was published: there is nothing to repeat")
    version = 1
    while version in finished and version in record.published:
        record.steps.append(finished[version])
        version += 1
    later = [v for v in finished.keys() | record.published.keys() if v > version]
    if later:
        raise RecordError(
            f"{path}: the events of version {version} are missing, those of version {min(later)} are there"
        )
    record.torn = torn
    return record


def _begun(path: Path, event: Mapping[str, Any]) -> Record:
    if event["format"] != FORMAT:
        raise RecordError(f"{path} has format {event['format']}, this program reads format {FORMAT}")
    return Record(event["config"], {name: event[name] for name in ("libraries", "machine")})


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(line number, event); None for a last line that was torn."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("torn")
                yield number, json.loads(line)
            except ValueError:
                if file.read(1):
                    raise RecordError(f"{path}, line {number} is torn or changed, and more lines follow") from None
                yield number, None
