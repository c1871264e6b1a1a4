"""What the trained rows contained, for `asyncflow replay`: one file per step and data-parallel replica, in numpy's npz.

The rank that leads a replica has the rows in its hands anyway; a thread of it writes them while the next step runs.
Disk: about 4 bytes per prompt token and 8 per answer token of every sample, at most `limit_bytes` per replica. What
would go beyond is not recorded, nor is anything after it, and a warning says from which step on.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.ragged import Ragged
from mindspeed_asyncflow.errors import RecordError
from mindspeed_asyncflow.observe.log import get_logger

FIELDS = ("group", "member", "oldest", "newest")  # of every row; the two last are its policy versions


class NoSamples:
    """Where nothing is recorded."""

    columns: tuple[str, ...] = ()  # that must be read beside those that are trained

    def add(
        self,
        rows: np.ndarray,
        groups: Mapping[int, tuple[int, int]],
        versions: Mapping[int, tuple[int, int]],
        columns: Mapping[str, Any],
    ) -> None:
        """Rows of a chunk: `groups` and `versions` as of `TrainWorker.train`, `columns` as the dock gave them."""

    def finish(self, version: int) -> None:
        """The rows since the last call make `version`."""

    def settle(self) -> None:
        """Wait until what is finished so far is in its files. From any thread."""

    def close(self) -> None: ...


class SampleLog(NoSamples):
    columns = ("reward",)

    def __init__(self, folder: Path, replica: int, limit_bytes: int) -> None:
        self.folder, self.replica, self.limit_bytes = Path(folder), replica, limit_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._chunks: list[dict[str, np.ndarray]] = []
        self._written = 0
        self._ended = False  # nothing more is recorded
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None

    def add(
        self,
        rows: np.ndarray,
        groups: Mapping[int, tuple[int, int]],
        versions: Mapping[int, tuple[int, int]],
        columns: Mapping[str, Any],
    ) -> None:
        if self._ended or not len(rows):
            return
        table = np.array([[*groups[r], *versions[r]] for r in rows.tolist()], np.int64)  # [n, 4]
        chunk = {f"row.{name}": table[:, i] for i, name in enumerate(FIELDS)}
        for name, values in columns.items():
            if isinstance(values, Ragged):  # a view into the dock: the rows are freed after this step
                packed = values.packed()
                chunk[f"flat.{name}"] = np.array(packed.stacked)
                chunk[f"length.{name}"] = np.array(packed.lengths)
            else:
                chunk[f"value.{name}"] = np.array(values)
        self._chunks.append(chunk)

    def finish(self, version: int) -> None:
        if self._ended:
            return
        names = dict.fromkeys(name for chunk in self._chunks for name in chunk)
        arrays = {name: np.concatenate([chunk[name] for chunk in self._chunks]) for name in names}
        self._chunks = []
        size = sum(a.nbytes for a in arrays.values())
        if self._written + size > self.limit_bytes:
            self._end(version, f"they would take more than this replica's {self.limit_bytes >> 20} MiB")
            return
        self._written += size
        self.settle()
        if self._ended:  # by the write that was under way: nothing after a hole
            return
        self._writing = self._thread.submit(self._write, version, arrays)

    def _write(self, version: int, arrays: Mapping[str, Any]) -> None:
        path = file_of(self.folder, version - 1, self.replica)
        temporary = path.with_suffix(".part")
        try:
            with temporary.open("wb") as file:
                np.savez(file, **arrays)
            os.replace(temporary, path)
        except OSError as error:  # boundary: a full disk ends the record, not the run
            temporary.unlink(missing_ok=True)
            self._end(version, str(error))

    def _end(self, version: int, why: str) -> None:
        self._ended = True
        get_logger("events").warning(
            "samples of replica %d are not recorded from step %d on: %s (observe.events_mb); "
            "`asyncflow replay` repeats the steps before it",
            self.replica,
            version - 1,
            why,
        )

    def settle(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        self.settle()
        self._thread.shutdown()


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The rows that one step trained, of all replicas."""

    groups: np.ndarray  # int64 [n]
    members: np.ndarray  # int64 [n]
    versions: tuple[np.ndarray, np.ndarray]  # (oldest, newest), int32 [n] each
    columns: dict[str, Any]  # Ragged or array of n rows each


def file_of(folder: Path, step: int, replica: int) -> Path:
    return folder / f"step_{step:06d}_replica_{replica}.npz"


def is_recorded(folder: Path, step: int, replicas: int) -> bool:
    return all(file_of(folder, step, replica).is_file() for replica in range(replicas))


def read_step(folder: Path, step: int, replicas: int) -> StepSamples:
    """Raises RecordError for a file that is missing, torn or not what `SampleLog` writes."""
    parts = [_read(file_of(folder, step, replica)) for replica in range(replicas)]
    filled = [part for part in parts if part]  # a replica may have had no row
    names = dict.fromkeys(name for part in filled for name in part)
    try:
        joined = {name: np.concatenate([part[name] for part in filled]) for name in names}
        columns: dict[str, Any] = {n.removeprefix("value."): a for n, a in joined.items() if n.startswith("value.")}
        for name in [n.removeprefix("flat.") for n in joined if n.startswith("flat.")]:
            offsets = np.concatenate(([0], np.cumsum(joined[f"length.{name}"])))
            columns[name] = Ragged.from_flat(joined[f"flat.{name}"], offsets)
        group, member, oldest, newest = (joined.get(f"row.{name}", np.zeros(0, np.int64)) for name in FIELDS)
    except (KeyError, ValueError) as error:
        raise RecordError(f"the samples of step {step} in {folder} do not fit together: {error}") from error
    return StepSamples(group, member, (oldest.astype(np.int32), newest.astype(np.int32)), columns)


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise RecordError(f"{path} is missing: the samples of this step were not recorded") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise RecordError(f"{path} is torn or changed: {error}") from error
