"""Pages that released CPU storages leave behind, kept for the next block of the same size.

A device allocator keeps what is freed. malloc gives large blocks back to the kernel, which clears every page again
when the block returns: that alone makes moving memory in three times slower than copying it. So the pages of a
released storage are moved (by page table, not by copy) into a reservation of our own, and under the storage again
when it is restored. Where the kernel refuses, storages are simply released and mapped anew.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any

MAY_MOVE, FIXED, DONT_UNMAP = 1, 2, 4  # flags of mremap(2)
_FAILED = ctypes.c_void_p(-1).value
_SMALLEST = 256 * 1024  # bytes; below, clearing pages costs less than two system calls
_MOST_BLOCKS = 8192  # each one is a mapping of its own, and a process may have 65530


def _libc() -> Any:
    """The two calls with their types, or None where they do not exist."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mremap.restype = libc.mmap.restype = ctypes.c_void_p
    except (OSError, AttributeError):
        return None
    size, address = ctypes.c_size_t, ctypes.c_void_p
    libc.mremap.argtypes = (address, size, size, ctypes.c_int, address)
    libc.mmap.argtypes = (address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (address, size)
    return libc


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """(first page, length) of pages that lie wholly inside the block; the length depends on `nbytes` alone."""
    page = mmap.PAGESIZE
    return -(-address // page) * page, max(nbytes // page - 1, 0) * page


class PageCache:
    """Thread-safe. Addresses given must belong to private anonymous memory that nobody uses meanwhile."""

    def __init__(self) -> None:
        self._libc = _libc()
        self._kept: dict[int, list[int]] = {}  # length -> where such pages are
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of pages that wait for a block."""
        with self._lock:
            return sum(length * len(places) for length, places in self._kept.items())

    def keep(self, address: int, nbytes: int) -> bool:
        """Take the pages of a block that is about to be freed. The block stays mapped, its contents are lost."""
        start, length = _whole_pages(address, nbytes)
        with self._lock:
            full = sum(map(len, self._kept.values())) >= _MOST_BLOCKS
        if self._libc is None or nbytes < _SMALLEST or full:
            return False
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        place = self._libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if place == _FAILED:
            return False
        if not self._move(start, length, place, MAY_MOVE | FIXED | DONT_UNMAP):
            self._libc.munmap(place, length)
            return False
        with self._lock:
            self._kept.setdefault(length, []).append(place)
        return True

    def put(self, address: int, nbytes: int) -> bool:
        """Lay kept pages, with whatever they contain, under a new block whose contents do not matter."""
        start, length = _whole_pages(address, nbytes)
        with self._lock:
            places = self._kept.get(length)
            place = places.pop() if places else None
        if place is None:
            return False
        if not self._move(place, length, start, MAY_MOVE | FIXED):
            self._libc.munmap(place, length)
            return False
        return True

    def _move(self, source: int, length: int, target: int, flags: int) -> bool:
        return bool(self._libc.mremap(source, length, length, flags, target) == target)
