"""A consistent cut of a whole dock on disk, and back, also into another number of pairs.

While the cut is taken, or put back, all pairs are frozen: calls of others wait. A cut holds rows with their columns,
groups in issue order, policy versions, what each task has done, which partitions are sealed, and tasks added at run
time. Claims are not part of it: their rows are offered again. Row handles are new after `restore`; groups and members
keep their numbers. Ages (`max_age_s`) begin anew.

A snapshot is a folder: `manifest.json`, and one `.npz` per pair and partition that a plain numpy can read: of each
part of a column its bytes (`v.`), lengths in elements (`l.`) and the rows or groups that have it (`i.`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_asyncflow.dock import kinds
from mindspeed_asyncflow.dock.columns import ColumnSpec, Schema, column_table, read_columns
from mindspeed_asyncflow.dock.ragged import Ragged
from mindspeed_asyncflow.dock.table import NO_VERSION
from mindspeed_asyncflow.errors import AsyncFlowError, DockError

if TYPE_CHECKING:
    from mindspeed_asyncflow.dock.client import DockClient

FORMAT = 2
_CHUNK_ROWS = 8192
_ROWS = ("ids", "sizes", "counts", "members", "ready", "version_min", "version_max")


def save(
    dock: DockClient, folder: str | os.PathLike[str], timeout_s: float, only: Collection[str] | None = None
) -> dict[str, Any]:
    """Writes a snapshot to `folder`, which must not exist; returns its manifest. Appears whole or not at all. `only`:
    these partitions, where they are there; None: all.

    Raises DockError when `folder` cannot be written, or the cut takes longer than `timeout_s`.
    """
    target = Path(folder)
    if target.exists():
        raise DockError(f"{target} exists already; give a new folder for the snapshot")
    parts = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        parts.mkdir(parents=True)
        with frozen(dock, timeout_s):
            manifest = _save_all(dock, parts, only)
        (parts / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        parts.rename(target)
    except OSError as error:
        raise DockError(f"the snapshot {target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return manifest


def load(dock: DockClient, folder: str | os.PathLike[str], timeout_s: float) -> dict[str, Any]:
    """Puts a snapshot into a dock that has none of its partitions; returns its manifest.

    Raises DockError when the folder holds no whole snapshot, the columns differ, or a partition is there already.
    """
    source = Path(folder)
    try:
        manifest = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
        files = [(f["partition"], source / f["file"]) for f in manifest["files"]]
        columns = read_columns(manifest["columns"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DockError(f"{source} holds no whole snapshot of a dock: {error}") from error
    if manifest["format"] != FORMAT or columns != list(dock.schema.columns.values()):
        raise DockError(f"the snapshot {source} has other columns than this dock, or another format")
    there = set(dock.stats()["partitions"]) & set(manifest["partitions"])
    if there:
        raise DockError(f"partitions {sorted(there)} are in this dock already; restore into an empty one")
    for _, path in files:
        _check(path)
    with frozen(dock, timeout_s), _closing_on_failure(dock, manifest["partitions"]):
        for name, read in manifest["tasks"].items():
            dock.add_task(name, read)
        for partition, path in files:
            with np.load(path, allow_pickle=False) as arrays:
                _load_part(dock, partition, dict(arrays), manifest)
        for partition, about in manifest["partitions"].items():
            if about["sealed"]:
                dock.seal(partition)
    return manifest


@contextlib.contextmanager
def _closing_on_failure(dock: DockClient, partitions: Iterable[str]) -> Iterator[None]:
    """What was restored of a snapshot that cannot be restored wholly goes again."""
    try:
        yield
    except BaseException:  # boundary: nobody stays frozen, and the error goes on
        for name in set(dock.stats()["partitions"]) & set(partitions):
            with contextlib.suppress(AsyncFlowError):
                dock.close_partition(name)
        raise


def _check(path: Path) -> None:
    """Raises DockError unless the checksums of a file are right: before anything of the snapshot is put."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        raise DockError(f"{path} of the snapshot is damaged: {error}") from error
    if damaged is not None:
        raise DockError(f"{path} of the snapshot is damaged: {damaged} has another checksum")


@contextlib.contextmanager
def frozen(dock: DockClient, timeout_s: float) -> Iterator[None]:
    """Only calls of this client are carried out inside. Raises DockError when it takes longer than `timeout_s`."""
    pairs = list(dock.pairs())
    try:
        for pair in pairs:
            pair.freeze(timeout_s)
        yield
    except BaseException:  # boundary: half a snapshot does not stay, and the error goes on
        for pair in pairs:
            with contextlib.suppress(DockError):
                pair.thaw()
        raise
    late = []
    for pair in pairs:
        try:
            pair.thaw()
        except DockError:
            late.append(pair.address)
    if late:
        raise DockError(
            f"the dock went on by itself, as it was frozen for longer than {timeout_s:g} s or a pair started again: "
            f"{', '.join(late)}"
        )


# -- out ---------------------------------------------------------------------------------------------------------------


def _save_all(dock: DockClient, folder: Path, only: Collection[str] | None) -> dict[str, Any]:
    schema = dock.schema
    files: list[dict[str, Any]] = []
    partitions: dict[str, dict[str, Any]] = {}
    tasks: dict[str, list[str]] = {}
    for pair in dock.pairs():
        stats = pair.stats()
        for name in stats["partitions"] if only is None else [n for n in only if n in stats["partitions"]]:
            about = pair.export(name)
            tasks |= dict(zip(about.names("tasks"), about["task_columns"]))
            total = partitions.setdefault(name, {"sealed": True, "rows": 0, "groups": 0})
            total["sealed"] = total["sealed"] and about.flag("sealed")
            rows = about.ints("rows")
            total["rows"] += len(rows)
            total["groups"] += len(about.ints("ids"))
            if not len(rows):
                continue
            file = f"pair{pair.pair}-{len(files)}.npz"
            arrays = {n: about[n] for n in _ROWS} | {
                f"done.{t}": about[f"done{i}"] for i, t in enumerate(about["tasks"])
            }
            for column in schema.columns.values():
                arrays |= _cells(dock, schema, column, rows, about)
            np.savez(folder / file, **arrays)
            files.append({"file": file, "partition": name, "pair": pair.pair, "rows": len(rows)})
    return {
        "format": FORMAT,
        "columns": column_table(schema),
        "tasks": tasks, "partitions": partitions, "files": files, "pairs": len(dock.addresses),
    }  # fmt: skip


def _cells(dock: DockClient, schema: Schema, column: ColumnSpec, rows: np.ndarray, about: Any) -> dict[str, np.ndarray]:
    """The cells of one column: of each part bytes and lengths, and the rows (or groups) that have it."""
    counts = about.ints("counts")
    has = (about.ints("ready") & schema.bit[column.name]) != 0
    if column.shared:
        firsts = np.cumsum(counts) - counts
        index = np.flatnonzero(has[firsts])
        chosen = rows[firsts[index]]
    else:
        index = np.flatnonzero(has)
        chosen = rows[index]
    if not len(index):
        return {}
    found = {f"i.{column.name}": index}
    packed = [
        kinds.pack(column, schema.parts[column.name], dock.read(chunk, [column.name])[column.name])
        for chunk in _chunks(chosen)
    ]
    for i, part in enumerate(schema.parts[column.name]):
        found[f"v.{part.name}"] = np.concatenate([chunk[i].values.view(np.uint8) for chunk in packed])
        found[f"l.{part.name}"] = np.concatenate([chunk[i].lengths for chunk in packed])
    return found


def _chunks(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[begin : begin + _CHUNK_ROWS] for begin in range(0, len(rows), _CHUNK_ROWS)]


# -- in ----------------------------------------------------------------------------------------------------------------


class _Stored:
    """One column of a snapshot file; `take` gives the values of some of its rows (or groups) as a put wants them."""

    def __init__(self, schema: Schema, column: ColumnSpec, arrays: dict[str, np.ndarray], units: int) -> None:
        self.column = column
        self._place = np.full(units, -1, np.int64)
        self._place[arrays[f"i.{column.name}"]] = np.arange(len(arrays[f"i.{column.name}"]))
        self._cells = []
        for part in schema.parts[column.name]:
            lengths = arrays[f"l.{part.name}"]
            counts = lengths * (part.itemsize // part.dtype.itemsize)
            flat = arrays[f"v.{part.name}"].view(part.dtype)
            if int(counts.sum()) != len(flat):
                raise ValueError(f"column {column.name!r} has {len(flat)} items for {counts.sum()}")
            self._cells.append(Ragged(flat, np.cumsum(counts) - counts, lengths, part.inner))

    def take(self, units: np.ndarray) -> Any:
        index = self._place[units]
        return kinds.unpack(self.column, [cells.take(index) for cells in self._cells])


def _load_part(dock: DockClient, partition: str, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
    schema = dock.schema
    counts, ready = arrays["counts"], arrays["ready"]
    ends = np.cumsum(counts)
    stored = {
        c.name: _Stored(schema, c, arrays, len(counts) if c.shared else len(ready))
        for c in schema.columns.values() if f"i.{c.name}" in arrays
    }  # fmt: skip
    shared = schema.mask([c.name for c in schema.columns.values() if c.shared])
    handles = np.empty(len(ready), np.int64)
    for groups in _alike(ready[ends - counts] & shared):
        columns = _named(schema, int(ready[ends[groups[0]] - counts[groups[0]]] & shared))
        first, last = int(ends[groups[0]] - counts[groups[0]]), int(ends[groups[-1]])
        found = dock.put(
            partition, arrays["ids"][groups], arrays["sizes"][groups], counts[groups], arrays["members"][first:last],
            {name: stored[name].take(groups) for name in columns},
        )  # fmt: skip
        handles[first:last] = np.concatenate(found)
    for mask in np.unique(ready & ~shared).tolist():
        for rows in _chunks(np.flatnonzero((ready & ~shared) == mask)):
            if mask:
                columns = _named(schema, mask)
                known = arrays["version_min"][rows] != NO_VERSION
                for chosen, versions in ((rows[known], True), (rows[~known], False)):
                    span = (arrays["version_min"][chosen], arrays["version_max"][chosen]) if versions else None
                    if len(chosen):
                        values = {name: stored[name].take(chosen) for name in columns}
                        dock.write(handles[chosen], values, versions=span)
    for task in manifest["tasks"]:
        done = arrays.get(f"done.{task}")
        if done is not None and done.any():
            dock.finish(task, handles[done])


def _alike(masks: np.ndarray) -> Sequence[np.ndarray]:
    """Stretches of neighbouring groups with the same mask, in order, none longer than a chunk."""
    cuts = np.flatnonzero(masks[1:] != masks[:-1]) + 1
    return [chunk for run in np.split(np.arange(len(masks)), cuts) for chunk in _chunks(run)]


def _named(schema: Schema, mask: int) -> list[str]:
    return [name for name, bit in schema.bit.items() if mask & int(bit)]
