"""Checksums of weight shards, and one fingerprint of a whole version made of them."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


_BATCH_BYTES = 16 << 20  # what one thread sums at a time
_MOST_THREADS = 8  # one sums about 4 GB/s; more than these meet the limit of the memory


def checksum(data: Any) -> int:
    """crc32 of a buffer."""
    return zlib.crc32(data)


def checksums(buffers: Iterable[np.ndarray]) -> Iterator[int]:
    """crc32 of each uint8 [n], in order; threads share large amounts (zlib lets go of the interpreter)."""
    batches: list[list[np.ndarray]] = [[]]
    room = _BATCH_BYTES
    for buffer in buffers:
        if batches[-1] and len(buffer) > room:
            batches.append([])
            room = _BATCH_BYTES
        batches[-1].append(buffer)
        room -= len(buffer)
    if len(batches) == 1:
        yield from map(checksum, batches[0])
        return
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="checksum") as threads:
        for summed in threads.map(lambda batch: [checksum(buffer) for buffer in batch], batches):
            yield from summed


def fingerprint(digest: bytes, checksums: np.ndarray) -> str:
    """16 hex digits: blake2b over the table's digest (names, dtypes, shapes, boxes) and uint32 [shards] checksums."""
    return blake2b(digest + np.ascontiguousarray(checksums, "<u4").tobytes(), digest_size=8).hexdigest()


def fingerprint_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """16 hex digits over whole host tensors, whatever the order of the mapping: names, dtypes, shapes and bytes."""
    names = sorted(tensors)
    digest = blake2b(digest_size=16)
    sums = []
    for name in names:
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        sums.append(checksum(bytes_of(tensor)))
    return fingerprint(digest.digest(), np.array(sums, np.uint32))


def bytes_of(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous host tensor, valid while it lives. Not by `numpy()`, after which torch refuses for ever
    to resize the storage, and no weight could leave its device any more."""
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
