"""Train state of a rank in checkpoints, for the workers of trainer and critic ranks; with a shared disk or without.

A rank that sees the driver's folder writes into it. One that does not, since it runs on another host without a shared
disk, writes beside the place where that folder would be, and the driver fetches the files (`bring`). To load, every
rank must see the checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mindspeed_asyncflow.errors import CheckpointError
from mindspeed_asyncflow.observe.checkpoints import SavedFile, explained
from mindspeed_asyncflow.observe.trace import Tracer

AWAY = ".away"  # ends the name of a folder that the driver does not see
CHUNK = 64 << 20  # bytes fetched at once


class SavingEngine(Protocol):
    """What `TrainEngine` and `CriticEngine` have in common."""

    def begin_save(self, folder: str) -> None: ...

    def finish_save(self) -> list[SavedFile]: ...

    def load_checkpoint(self, folder: str) -> None: ...


class KeepsState:
    """Base of the workers of ranks."""

    name: str
    tracer: Tracer
    part = ""  # folder of a checkpoint that has the state of these ranks
    lane = ""  # of the spans
    _folder = Path()  # where the last save is written
    _saved: Sequence[SavedFile] = ()  # its files, named from there

    def _engine(self) -> SavingEngine:
        raise NotImplementedError

    def begin_save(self, folder: str) -> bool:
        """This rank's state to host memory, on its way to the checkpoint that is written in `folder`; whether this rank
        sees that folder, which nobody had before."""
        shared, self._folder = Path(folder).is_dir(), Path(folder)
        if not shared:
            self._folder = self._folder.with_suffix(AWAY)
            for old in self._folder.parent.glob(f".*{AWAY}"):  # of a run that was killed
                if old != self._folder:
                    shutil.rmtree(old, ignore_errors=True)
        with self.tracer.span(f"{self.lane}/save", lane=self.name):
            self._engine().begin_save(str(self._folder / self.part))
        return shared

    def finish_save(self) -> list[SavedFile]:
        """The files of this rank, named from the checkpoint, as soon as they are on the disk. Beside training."""
        files = self._engine().finish_save()
        named = [dataclasses.replace(file, name=f"{self.part}/{file.name}") for file in files]
        self._saved = named
        return named

    def saved_bytes(self, name: str, offset: int, count: int) -> bytes:
        """A part of a file of the last save. Beside training."""
        with explained(self._folder, "read"), (self._folder / name).open("rb") as file:
            file.seek(offset)
            return file.read(count)

    def drop_saved(self) -> None:
        """The driver has all files of a folder that it does not see: they go. Beside training."""
        if self._folder.suffix != AWAY:
            raise CheckpointError(f"{self.name} shares {self._folder} with the driver and removes nothing of it")
        for file in self._saved:
            (self._folder / file.name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other ranks of this host have files there too
                (self._folder / file.name).parent.rmdir()
        with contextlib.suppress(OSError):
            (self._folder / self.part).rmdir()
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def load_checkpoint(self, folder: str) -> None:
        """Go on from the checkpoint in `folder`, whatever the parallel sizes of its ranks were."""
        with self.tracer.span(f"{self.lane}/load", lane=self.name):
            self._engine().load_checkpoint(str(Path(folder) / self.part))


async def bring(folder: Path, rank: Any, files: Sequence[SavedFile]) -> None:
    """Fetch what `rank`, whose `begin_save` has not seen `folder`, has saved, and let it remove its copy.

    Raises `CheckpointError` where the disk refuses.
    """
    for file in files:
        path = folder / file.name
        with explained(folder, "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                for at in range(0, file.bytes, CHUNK):
                    part = await rank.saved_bytes(file.name, at, CHUNK)
                    await asyncio.to_thread(out.write, part)
    await rank.drop_saved()
