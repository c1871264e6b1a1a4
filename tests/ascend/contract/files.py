"""The text of one release of a library: from a wheel, a source archive, a git clone or an installed package."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path


class Files:
    """The text files of one release by their path inside it."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def read(self, path: str) -> str | None:
        return self._texts.get(path)

    def search(self, word: str, folder: str) -> bool:
        """Whether a file below `folder` contains `word`, as a whole word."""
        pattern = re.compile(rf"\b{re.escape(word)}\b")
        return any(n.startswith(f"{folder}/") and pattern.search(text) for n, text in self._texts.items())

    def contains(self, text: str, folder: str) -> bool:
        return any(name.startswith(f"{folder}/") and text in content for name, content in self._texts.items())

    @classmethod
    def of_archive(cls, path: Path, folder: str) -> Files:
        """A wheel, or a source archive; of compiled libraries only the environment variables that they name."""
        texts: dict[str, str] = {}
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.startswith(f"{folder}/"):
                        texts |= _readable(name, archive.read(name))
        else:
            with tarfile.open(path) as archive:
                for member in archive:
                    name = member.name.partition("/")[2]
                    if member.isfile() and name.startswith(f"{folder}/") and (file := archive.extractfile(member)):
                        texts |= _readable(name, file.read())
        return cls(texts)

    @classmethod
    def of_clone(cls, clone: Path, revision: str, folder: str) -> Files:
        """`folder` of a git clone as it was at `revision`."""
        command = ["git", "-C", str(clone), "archive", "--format=tar", revision, folder]
        done = subprocess.run(command, capture_output=True)
        if done.returncode:
            raise FileNotFoundError(f"{clone}: {revision}:{folder} cannot be read: {done.stderr.decode().strip()}")
        texts: dict[str, str] = {}
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)):
                    texts |= _readable(member.name, file.read())
        return cls(texts)

    @classmethod
    def of_folder(cls, parent: Path, folder: str) -> Files:
        """An installed package; a file is read when it is asked for."""
        return cls(_OnDisk(parent, folder))


class _OnDisk(Mapping[str, str]):
    def __init__(self, parent: Path, folder: str) -> None:
        self._parent, self._folder = parent, folder

    def __getitem__(self, path: str) -> str:
        try:
            return (self._parent / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            raise KeyError(path) from None

    def __iter__(self) -> Iterator[str]:
        for path in (self._parent / self._folder).rglob("*.py"):
            yield path.relative_to(self._parent).as_posix()

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _readable(name: str, data: bytes) -> dict[str, str]:
    if name.endswith((".py", ".pyi", ".yaml", ".cpp", ".h")):
        return {name: data.decode("utf-8", "replace")}
    if name.endswith(".so"):
        return {name: "\n".join({m.decode() for m in re.findall(rb"PYTORCH_NPU_[A-Z0-9_]+", data)})}
    return {}
