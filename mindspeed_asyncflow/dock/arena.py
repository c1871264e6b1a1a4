"""The shared-memory file of one node. It is touched once and recycled for ever: no write creates a segment."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

import numpy as np

from mindspeed_asyncflow.dock.columns import Part
from mindspeed_asyncflow.dock.ragged import Ragged
from mindspeed_asyncflow.errors import PlatformError

GRANULE = 64  # bytes: space is handed out in these
TOKEN_BYTES = 32  # at the start of the arena: tells a client that it mapped the right file
SHM_DIR = "/dev/shm"


class Arena:
    """One shared-memory file, mapped. Offsets are bytes from its start; the first granule is reserved."""

    def __init__(self, path: str, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self.bytes = np.frombuffer(mapping, np.uint8)
        self.memory = memoryview(mapping)
        self._views: dict[np.dtype, np.ndarray] = {}

    @classmethod
    def create(cls, path: str | None, nbytes: int) -> Arena:
        """Creates and touches the file. Raises PlatformError when the memory or the name is not available."""
        path = path or f"{SHM_DIR}/asyncflow-dock-{os.getpid()}-{secrets.token_hex(4)}"
        nbytes = -(-nbytes // GRANULE) * GRANULE
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise PlatformError(f"the dock arena {path} cannot be created: {error.strerror}") from error
        try:
            os.posix_fallocate(fd, 0, nbytes)  # without it, missing memory would be a bus error at the first touch
            arena = cls(path, mmap.mmap(fd, nbytes))
        except OSError as error:
            os.unlink(path)
            raise PlatformError(
                f"{nbytes >> 20} MiB of shared memory for the dock are not available ({error.strerror}); "
                "lower dock.arena_mb"
            ) from error
        finally:
            os.close(fd)
        arena.bytes.fill(0)
        arena.bytes[:TOKEN_BYTES] = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), np.uint8)
        return arena

    @classmethod
    def reopen(cls, path: str) -> Arena:
        """The arena of a server that was killed. Raises PlatformError when it cannot be mapped."""
        try:
            fd = os.open(path, os.O_RDWR)
            try:
                return cls(path, mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)))
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise PlatformError(f"the dock arena {path} cannot be opened again: {error}") from error

    @classmethod
    def attach(cls, path: str, token: bytes) -> Arena | None:
        """Maps the arena of a server on this node; None when the file is not the one that carries `token`."""
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            return None
        try:
            mapping = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except (OSError, ValueError):  # an empty or a vanished file is not ours
            return None
        finally:
            os.close(fd)
        arena = cls(path, mapping)
        return arena if arena.token == token else None

    @property
    def token(self) -> bytes:
        return self.bytes[:TOKEN_BYTES].tobytes()

    def view(self, dtype: np.dtype) -> np.ndarray:
        """The whole arena as a read-only array of `dtype`; element i is at byte i * itemsize."""
        whole = self._views.get(dtype)
        if whole is None:
            whole = self.bytes.view(dtype)
            whole.flags.writeable = False
            self._views[dtype] = whole
        return whole

    def ragged(self, part: Part, offsets: np.ndarray, lengths: np.ndarray) -> Ragged:
        """Cells at byte `offsets` as views."""
        return Ragged(self.view(part.dtype), offsets // part.dtype.itemsize, lengths, part.inner)

    def room(self, offset: int, part: Part, items: int) -> np.ndarray:
        """Writable [items] at byte `offset`."""
        return self.bytes[offset : offset + items * part.dtype.itemsize].view(part.dtype)

    def unlink(self) -> None:
        Path(self.path).unlink(missing_ok=True)
