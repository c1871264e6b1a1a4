"""Buffers that are used again: memory that was touched before is several times faster to fill than fresh memory."""

from __future__ import annotations

import threading
import weakref

import numpy as np

_STEP = 1 << 12  # bytes: sizes are rounded up to whole steps, large ones to an eighth of their power of two


class BufferPool:
    """Thread-safe. A buffer comes back by itself when the last array made from it is garbage."""

    def __init__(self, most_bytes: int = 1 << 28) -> None:
        self._most_bytes = most_bytes
        self._idle: dict[int, list[np.ndarray]] = {}
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self.idle_bytes = 0
        self.made = 0

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], of any content."""
        size = _rounded(nbytes)
        with self._lock:
            idle = self._idle.get(size)
            owner = idle.pop() if idle else None
            if owner is None:
                self.made += 1
            else:
                self.idle_bytes -= size
        if owner is None:
            owner = np.empty(size, np.uint8)
        whole = np.frombuffer(owner.data, np.uint8)  # every view of it keeps exactly this object alive
        weakref.finalize(whole, self._give, owner).atexit = False
        return whole[:nbytes]

    def _give(self, owner: np.ndarray) -> None:
        with self._lock:
            if self.idle_bytes + len(owner) <= self._most_bytes:
                self.idle_bytes += len(owner)
                self._idle.setdefault(len(owner), []).append(owner)


def _rounded(nbytes: int) -> int:
    step = max(_STEP, (1 << max(nbytes - 1, 1).bit_length()) >> 4)
    return max(-(-nbytes // step), 1) * step
