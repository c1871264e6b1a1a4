"""Checksums of weight shards, and one fingerprint of a whole version made of them."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def checksum(data: Any, start: int = 0) -> int:
    """crc32 of a buffer; `start` is the checksum of the bytes before it."""
    return zlib.crc32(data, start)


def fingerprint(digest: bytes, checksums: np.ndarray) -> str:
    """16 hex digits: blake2b over the table's digest (names, dtypes, shapes, boxes) and uint32 [shards] checksums."""
    return blake2b(digest + np.ascontiguousarray(checksums, "<u4").tobytes(), digest_size=8).hexdigest()


def fingerprint_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """16 hex digits over whole host tensors, whatever the order of the mapping: names, dtypes, shapes and bytes."""
    names = sorted(tensors)
    digest = blake2b(digest_size=16)
    checksums = []
    for name in names:
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        checksums.append(checksum(_host_bytes(tensor)))
    return fingerprint(digest.digest(), np.array(checksums, np.uint32))


def _host_bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous host tensor, valid while it lives. Not by `numpy()`, after which torch refuses for ever
    to resize the storage, and no weight could leave its device any more."""
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
