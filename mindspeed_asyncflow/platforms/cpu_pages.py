"""The pool of pages behind a CPU's "device memory": what one storage releases, the next one gets, whatever its size.

A device allocator keeps what is freed. malloc gives large blocks back to the kernel, which clears every page again
when the block returns: that alone makes moving memory in three times slower than copying it. So the pages of a
released storage are moved (by page table, not by copy) into the pool, and from there under the storage that needs
bytes next: a piece of the right length where there is one, else the rest of a longer one is cut off, else several
pieces follow each other. No piece is shorter than 256 KiB: shorter ends go back to the kernel, so that neither pieces
nor mappings grow in number from turn to turn. Where the kernel refuses, storages are simply released and mapped anew.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_left, insort
from typing import Any

MAY_MOVE, FIXED, DONT_UNMAP = 1, 2, 4  # flags of mremap(2)
_FAILED = ctypes.c_void_p(-1).value
_SMALLEST = 256 * 1024  # bytes; below, clearing pages costs less than two system calls
_MOST_PIECES = 8192  # in the pool; each one is a mapping of its own, and a process may have 65530


def _libc() -> Any:
    """The calls with their types, or None where they do not exist."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mremap.restype = ctypes.c_void_p
    except (OSError, AttributeError):
        return None
    size, address = ctypes.c_size_t, ctypes.c_void_p
    libc.mremap.argtypes = (address, size, size, ctypes.c_int, address)
    libc.munmap.argtypes = (address, size)
    return libc


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """(first page, length) of pages that lie wholly inside the block; the length depends on `nbytes` alone."""
    page = mmap.PAGESIZE
    return -(-address // page) * page, max(nbytes // page - 1, 0) * page


def _mappings(start: int, length: int) -> list[tuple[int, int]]:
    """(first page, length) of the mappings that these pages lie in."""
    cuts = [start]
    try:
        with open("/proc/self/maps") as maps:
            firsts = [int(line.split("-", 1)[0], 16) for line in maps]
    except OSError:
        firsts = []
    cuts += [first for first in firsts if start < first < start + length]
    return [(cut, end - cut) for cut, end in zip(cuts, [*cuts[1:], start + length], strict=True)]


class PagePool:
    """Thread-safe. Addresses given must belong to private anonymous memory that nobody uses meanwhile."""

    def __init__(self) -> None:
        self._libc = _libc()
        self._free: list[tuple[int, int]] = []  # (length, where) of each piece, sorted
        self._laid: dict[int, list[int]] = {}  # first page of a block -> lengths of its pieces: separate mappings
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of pages that wait for a block."""
        with self._lock:
            return sum(length for length, _ in self._free)

    @property
    def pieces(self) -> int:
        """Runs of pages that wait for a block."""
        return len(self._free)

    def keep(self, address: int, nbytes: int) -> bool:
        """Take the pages of a block that is about to be freed, and say whether any were taken. The block stays mapped,
        its contents are lost."""
        if self._libc is None or nbytes < _SMALLEST:
            return False
        start, length = _whole_pages(address, nbytes)
        with self._lock:
            before = len(self._free)
            lengths = self._laid.pop(start, [length])
            if sum(lengths) != length:  # an earlier block began here and ended elsewhere
                lengths = [length]
            for piece in lengths:
                if not self._take(start, piece):  # malloc gave the block a place where pieces of others had been
                    for first, part in _mappings(start, piece):
                        self._take(first, part)
                start += piece
            return len(self._free) > before

    def _take(self, start: int, length: int) -> bool:
        """Move pages of one mapping into the pool, if they are enough to be worth it."""
        if length < _SMALLEST or len(self._free) >= _MOST_PIECES:
            return True
        place = self._libc.mremap(start, length, length, MAY_MOVE | DONT_UNMAP, None)
        if place == _FAILED:
            return False
        insort(self._free, (length, place))
        return True

    def put(self, address: int, nbytes: int) -> int:
        """Lay kept pages, with whatever they contain, under a new block whose contents do not matter; returns how many
        bytes of it have such pages now. The others have those that it came with."""
        start, length = _whole_pages(address, nbytes)
        laid: list[int] = []
        missing = length
        with self._lock:
            self._laid.pop(start, None)
            while missing >= _SMALLEST and self._free:
                # the shortest piece that is long enough, else the longest
                piece, place = self._free.pop(min(bisect_left(self._free, (missing, 0)), len(self._free) - 1))
                taken = min(piece, missing)
                if not self._move(place, taken, start + length - missing):
                    self._give_back(piece, place)
                    break
                self._cut_off(piece - taken, place + taken)
                laid.append(taken)
                missing -= taken
            if len(self._laid) >= _MOST_PIECES:  # of blocks that died by themselves, most of them
                self._laid.clear()
            if len(laid) > 1 or (laid and missing):
                self._laid[start] = [*laid, missing] if missing else laid
        return length - missing

    def _cut_off(self, length: int, place: int) -> None:
        """What a block leaves over of a piece."""
        if length >= _SMALLEST:
            insort(self._free, (length, place))
        elif length:
            self._give_back(length, place)

    def _give_back(self, length: int, place: int) -> None:
        """To the kernel."""
        self._libc.munmap(place, length)

    def _move(self, source: int, length: int, target: int) -> bool:
        return bool(self._libc.mremap(source, length, length, MAY_MOVE | FIXED, target) == target)
