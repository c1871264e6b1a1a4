"""Checkpoints of a run as files: begun beside the others, complete by one rename, never trusted by name.

    begin    -> .step_000010-1f3a.partial/  everybody writes into it: trainer/, critic/, dock/, state.json, hf/
    complete -> manifest.json               format, step, version, digest of the settings, every file, bytes, crc32
             -> step_000010/                one rename; what had the name before is kept until then
             -> latest                      a link, switched in one step
    retain   -> the oldest complete ones go, and what was begun and never completed

Whoever looks for a checkpoint reads manifests: a folder is complete if it has one and all files of it are there with
their sizes. `verify` reads the contents too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.errors import CheckpointError
from mindspeed_asyncflow.observe.log import get_logger

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"
_CHUNK = 8 << 20  # bytes read at once
_READERS = 4  # threads that compute checksums
_STEP, _BEGUN = re.compile(r"step_\d+"), re.compile(r"\.step_\d+(-[0-9a-f]+)?\.(partial|replaced)")


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of a checkpoint."""

    name: str  # relative to the folder of the checkpoint, with forward slashes
    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint says of itself."""

    step: int  # optimizer steps of the run until then
    version: int  # newest version of the policy
    config: str  # digest of the settings that must not change
    files: tuple[SavedFile, ...]
    about: dict[str, Any]  # what else the writer noted


def step_folder(root: Path, step: int) -> Path:
    """Where the complete checkpoint of `step` lies."""
    return root / f"step_{step:06d}"


def begin(root: Path, step: int) -> Path:
    """A new, empty folder in which the checkpoint of `step` is written. What an earlier attempt left is removed.

    No folder on any host has had its name: who does not see it shares no disk with the caller. Raises `CheckpointError`
    where it cannot be made.
    """
    partial = root / f".step_{step:06d}-{secrets.token_hex(4)}.partial"
    with explained(partial, "begun"):
        for old in root.glob(f".step_{step:06d}-*.partial"):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir(parents=True)
    return partial


def sums(folder: Path, under: str = "") -> list[SavedFile]:
    """All files in `folder`/`under` (one file, or a folder with what is below it), read for their checksums."""
    top = folder / under
    paths = sorted(p for p in top.rglob("*") if p.is_file()) if top.is_dir() else [top]
    with explained(top, "read"), ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(_sum, paths)
        return [SavedFile(p.relative_to(folder).as_posix(), *s) for p, s in zip(paths, found)]


def complete(
    partial: Path,
    files: Sequence[SavedFile],
    *,
    step: int,
    version: int,
    config: str,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Make what was written into `partial` the newest checkpoint of its root; returns the folder that it is in now.

    `files` are what its writers say that they wrote. Raises `CheckpointError`, with the earlier checkpoints as they
    were, unless exactly those are there with their sizes, and where the disk refuses.
    """
    root, target = partial.parent, step_folder(partial.parent, step)
    with explained(partial, "completed"):
        there = {p.relative_to(partial).as_posix() for p in partial.rglob("*") if p.is_file()}
        missing = [problem for file in files if (problem := _problem(partial, file))]
        if missing:
            raise CheckpointError(f"the checkpoint {partial} is not whole: {_first(missing)}")
        if strangers := sorted(there - {file.name for file in files}):
            raise CheckpointError(f"the checkpoint {partial} has files that nobody named: {_first(strangers)}")
        for file in files:
            _sync(partial / file.name)
        text = {"format": FORMAT, "step": step, "version": version, "config": config, "about": dict(about or {})}
        _write_durably(partial / MANIFEST, json.dumps({**text, "files": [asdict(file) for file in files]}, indent=1))
        replaced = root / f".step_{step:06d}.replaced"
        if target.exists():  # `newest_complete` still finds it under the other name
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        partial.rename(target)
        _sync(root)
        _point(root / LATEST, target.name)
        shutil.rmtree(replaced, ignore_errors=True)
    return target


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint. Raises `CheckpointError` with what is missing."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {found['format']}, this version reads {FORMAT}")
        files = tuple(SavedFile(**file) for file in found["files"])
        manifest = Manifest(int(found["step"]), int(found["version"]), found["config"], files, found["about"])
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error}") from error
    problems = [problem for file in files if (problem := _problem(folder, file))]
    if problems:
        raise CheckpointError(f"the checkpoint {folder} is not whole: {_first(problems)}")
    return manifest


def verify(folder: Path) -> Manifest:
    """`read_manifest`, and every file is read and compared with its checksum. Raises `CheckpointError`."""
    manifest = read_manifest(folder)
    with explained(folder, "read"), ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda file: _sum(folder / file.name)[1], manifest.files)
        damaged = [f"{file.name} has another checksum" for file, crc in zip(manifest.files, found) if crc != file.crc32]
    if damaged:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {_first(damaged)}")
    return manifest


def newest_complete(root: Path, *, check: bool = True) -> Path | None:
    """The newest checkpoint of `root` that is whole (`check`: and undamaged); None where there is none.

    Each newer one that was passed over is named in a warning.
    """
    for folder in _by_age(root):
        try:
            verify(folder) if check else read_manifest(folder)
        except CheckpointError as error:
            get_logger("checkpoints").warning("passed over: %s", error)
            continue
        return folder
    return None


def retain(root: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` (at least 1) newest complete checkpoints, and what was begun and never completed or
    only half removed; returns what went.

    Call it when no checkpoint is being written. One that has a manifest and is not whole stays: somebody may mend it.
    What cannot be removed is named in a warning, and tried again the next time.
    """
    whole = [folder for folder in _by_age(root) if _is_complete(folder)]
    kept, gone = whole[: max(keep, 1)], whole[max(keep, 1) :]
    gone += [p for p in _children(root) if _BEGUN.fullmatch(p.name) and p not in (*kept, *gone)]
    gone += [p for p in _children(root) if _STEP.fullmatch(p.name) and not _signed(p)]
    return [folder for folder in gone if _went(folder)]


def discard_after(root: Path, step: int, *, keep: bool = False) -> list[Path]:
    """Remove the checkpoints of later steps than `step`: who goes on from an earlier one undoes them. What went.

    `keep`: for those that `newest_complete` passed over. They are renamed, and nobody takes them for checkpoints any
    more: what could not be read may be mended, or have been out of reach for a moment.
    """
    gone = [folder for folder in _by_age(root) if _step(folder) > step]
    for folder in gone:
        _set_aside(folder) if keep else _remove(folder)
    left = _by_age(root)
    if gone and left:
        with explained(root, "updated"):
            _point(root / LATEST, left[0].name)
    return gone


@contextmanager
def explained(path: Path, verb: str) -> Iterator[None]:
    """Errors of the disk become `CheckpointError` with what to do."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.ENOSPC: "the disk is full; free some, lower checkpoint.keep, or set run.folder to another disk",
            errno.EDQUOT: "the quota is used up; free some, or set run.folder to another disk",
            errno.EFBIG: "the largest file size allowed here (ulimit -f) is too small",
            errno.EROFS: "the disk is read-only; set run.folder to one that can be written",
            errno.EACCES: "it may not be written; set run.folder to a folder that may",
        }.get(error.errno or 0, error.strerror or str(error))
        where = error.filename or path
        raise CheckpointError(f"the checkpoint {path} cannot be {verb}: {where}: {advice}") from error


def _problem(folder: Path, file: SavedFile) -> str:
    """Why `file` is not in `folder` as it should be; "" if it is."""
    try:
        size = (folder / file.name).stat().st_size
    except OSError:
        return f"{file.name} is missing"
    return "" if size == file.bytes else f"{file.name} has {size} of {file.bytes} bytes"


def _first(problems: Sequence[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _sum(path: Path) -> tuple[int, int]:
    """(bytes, crc32) of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _children(root: Path) -> list[Path]:
    return [p for p in root.iterdir() if p.is_dir() and not p.is_symlink()] if root.is_dir() else []


def _step(folder: Path) -> int:
    """Of the manifest, since names are not trusted; that of the name where there is no manifest."""
    try:
        return int(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return int(re.findall(r"\d+", folder.name)[0])


def _by_age(root: Path) -> list[Path]:
    """Folders that have a manifest, or are named as if they had; newest step first, of one step the final name."""
    found = [p for p in _children(root) if _STEP.fullmatch(p.name) or (_BEGUN.fullmatch(p.name) and _signed(p))]
    return sorted(found, key=lambda p: (_step(p), _STEP.fullmatch(p.name) is not None), reverse=True)


def _signed(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def _remove(folder: Path) -> None:
    """First the manifest: what is half removed is not complete."""
    with explained(folder, "removed"):
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _went(folder: Path) -> bool:
    try:
        _remove(folder)
    except CheckpointError as error:
        get_logger("checkpoints").warning("not removed: %s", error)
        return False
    return True


def _set_aside(folder: Path) -> None:
    to = folder.with_name(f"damaged_{folder.name.lstrip('.')}-{secrets.token_hex(2)}")
    with explained(folder, "renamed"):
        folder.rename(to)
    get_logger("checkpoints").warning("%s was passed over and is now %s", folder, to)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
    _sync(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """The bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point(link: Path, target: str) -> None:
    """Switch the link in one step, so that a reader never sees it missing."""
    temporary = link.with_name(f".{link.name}-{os.getpid()}-{threading.get_ident()}")
    temporary.unlink(missing_ok=True)
    os.symlink(target, temporary)
    os.replace(temporary, link)
