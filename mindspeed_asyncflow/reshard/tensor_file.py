"""Files in the safetensors format, written in one pass with a checksum, and read as maps of the disk. Numpy only.

A tensor is bytes and the name of a type here, since numpy has no bfloat16: `Stored.matrix` gives unsigned integers of
the same width, which is all that copying needs.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_asyncflow.errors import CheckpointError
from mindspeed_asyncflow.observe.checkpoints import SavedFile
from mindspeed_asyncflow.reshard.boxes import matrix_shape

WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}  # bytes of an element, by the format's names
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LONGEST_HEADER = 1 << 30
_AT_ONCE = 256 << 20  # bytes that may wait in memory for the disk


class Entry(NamedTuple):
    """A tensor to write. `parts` gives its bytes in order, when it is its turn."""

    name: str
    dtype: str  # of WIDTHS
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Any]]  # buffers of bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


def write(
    path: Path,
    entries: Sequence[Entry],
    about: Mapping[str, str],
    wrote: Callable[[int], None] = lambda count: None,
) -> SavedFile:
    """Write all entries to `path`, widest type first, so that every tensor is aligned; the file's name is without its
    folder. `wrote` is told of every part. The bytes are on the disk when it returns. Raises OSError."""
    ordered = sorted(entries, key=lambda e: -WIDTHS[e.dtype])
    header: dict[str, Any] = {"__metadata__": dict(about)}
    at = 0
    for entry in ordered:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    size, crc, waiting = 0, 0, 0
    with path.open("wb") as file:
        for part in (struct.pack("<Q", len(text)), text):
            size, crc = size + file.write(part), zlib.crc32(part, crc)
        for entry in ordered:
            for part in entry.parts():
                count = file.write(part)
                size, crc = size + count, zlib.crc32(part, crc)
                waiting += count
                if waiting >= _AT_ONCE:
                    os.fdatasync(file.fileno())
                    waiting = 0
                wrote(count)
        file.flush()
        os.fsync(file.fileno())
    if size != 8 + len(text) + at:
        raise CheckpointError(f"{path}: {size} bytes written, the tensors have {8 + len(text) + at}")
    return SavedFile(path.name, size, crc)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: np.ndarray  # uint8, mapped

    def matrix(self) -> np.ndarray:
        """[rows, cols] of unsigned integers as wide as the elements; a vector is a column."""
        return self.bytes.view(UNSIGNED[WIDTHS[self.dtype]]).reshape(matrix_shape(self.shape))


def read(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """All tensors of a file by name, mapped and not yet read, and what it says about itself.

    Raises `CheckpointError` for a file that is missing, cut short, or of another format.
    """
    try:
        mapped = np.asarray(np.memmap(path, np.uint8, "r"))
        (length,) = struct.unpack("<Q", mapped[:8].tobytes())
        if length > min(_LONGEST_HEADER, len(mapped) - 8):
            raise ValueError(f"its header says it has {length} bytes")
        header = json.loads(mapped[8 : 8 + length].tobytes())
        about = header.pop("__metadata__", {})
        data = mapped[8 + length :]
        tensors = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= len(data):
                raise ValueError(f"{name!r} lies behind its end")
            tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), data[first:last])
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return tensors, about
