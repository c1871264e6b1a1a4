"""Checksums of weight shards, and one fingerprint of a whole version made of them."""

from __future__ import annotations

import zlib
from hashlib import blake2b
from typing import Any

import numpy as np


def checksum(data: Any, start: int = 0) -> int:
    """crc32 of a buffer; `start` is the checksum of the bytes before it."""
    return zlib.crc32(data, start)


def fingerprint(digest: bytes, checksums: np.ndarray) -> str:
    """16 hex digits: blake2b over the table's digest (names, dtypes, shapes, boxes) and uint32 [shards] checksums."""
    return blake2b(digest + np.ascontiguousarray(checksums, "<u4").tobytes(), digest_size=8).hexdigest()
