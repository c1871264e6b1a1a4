"""Device memory by kind of use, measured from the storages themselves, and the host buffers it is swapped to.

On a CPU "device memory" is an accounted arena: the storages registered here and the pages that released ones left for
the next (`DeviceMemory.free_bytes`), as opposed to the buffers of a `HostPool`. Nothing is declared: every figure is
the sum of `nbytes` of storages that are alive when one asks, each counted once however many tensors look into it.
`DeviceMemory.census` finds the live tensors without these books.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.base import Platform, current

TRAIN_WEIGHTS, GRADIENTS, OPTIMIZER = "train weights", "gradients", "optimizer"
GENERATION_WEIGHTS, KV_CACHE, BUCKET = "generation weights", "kv cache", "bucket"
KINDS = (TRAIN_WEIGHTS, GRADIENTS, OPTIMIZER, GENERATION_WEIGHTS, KV_CACHE, BUCKET)

LARGEST_PIECE, SMALL_PIECE = 1 << 30, 1 << 20  # bytes of host memory pinned at once

_pools: weakref.WeakSet[HostPool] = weakref.WeakSet()


def storage_of(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage behind a weak reference, None once it is gone. The reference keeps its address from being reused."""
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)  # type: ignore[no-any-return]


def raw_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [nbytes] view of a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


class DeviceMemory:
    """Books of the device memory of this process. Thread-safe.

    Storages are known weakly: one that dies leaves the books by itself. A storage has one kind.
    """

    def __init__(self, platform: Platform | None = None) -> None:
        self.platform = platform or current()
        self._kinds: dict[str, dict[int, StorageWeakRef]] = {kind: {} for kind in KINDS}
        self._peak = 0
        self._peak_later = False  # inside `one_change`
        self._lock = threading.RLock()

    def adopt(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors` as `kind`; those that are counted so already change nothing.

        Raises `PlatformError`, with nothing changed, for an unknown kind and for a storage that is counted as another.
        """
        self.adopt_all({kind: tensors})

    def adopt_all(self, tensors: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """`adopt` for several kinds: all storages are counted or none."""
        with self._lock:
            found: dict[int, tuple[str, StorageWeakRef]] = {}
            for kind, members in tensors.items():
                self._book(kind)
                for tensor in members:
                    ref = StorageWeakRef(tensor.untyped_storage())
                    known = (k for k, books in self._kinds.items() if ref.cdata in books)
                    other, _ = found.get(ref.cdata) or (next(known, kind), ref)
                    if other != kind:
                        nbytes = tensor.untyped_storage().nbytes()
                        raise PlatformError(f"a storage of {nbytes} bytes is counted as {other}, not {kind}")
                    found[ref.cdata] = (kind, ref)
            for key, (kind, ref) in found.items():
                self._kinds[kind].setdefault(key, ref)
            self._note_peak()

    def empty(self, kind: str, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of undefined contents in a storage of its own."""
        return self.tensor(kind, (nbytes,), torch.uint8)

    def tensor(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """`shape` elements of `dtype`, contents undefined, in a storage of their own."""
        self._book(kind)
        tensor = torch.empty(0, dtype=dtype, device=self.platform.device())  # an NPU's storage knows its type
        storage = tensor.untyped_storage()
        count = math.prod(shape)
        self.platform.restore_storage(storage, count * dtype.itemsize)
        tensor.set_(storage, 0, (count,), (1,))  # type: ignore[call-overload]
        self.adopt(kind, [tensor])
        return tensor.view(tuple(shape))

    def release(self, tensor: torch.Tensor) -> int:
        """Free the storage of `tensor`; returns its bytes. It and all other views of the storage must not be read until
        `restore`. Raises `PlatformError` if the storage is not counted here or cannot be resized."""
        storage = tensor.untyped_storage()
        with self._lock:
            if not any(storage._cdata in known for known in self._kinds.values()):
                raise PlatformError(f"a storage of {storage.nbytes()} bytes is released that was never adopted")
        if not storage.resizable():
            raise PlatformError(
                f"a storage of {storage.nbytes()} bytes cannot be released: it maps a file, numpy or shared memory; "
                "clone the tensor first"
            )
        nbytes = storage.nbytes()
        self.platform.release_storage(storage)
        return nbytes

    def restore(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Give a released storage `nbytes` bytes of undefined contents. Raises `PlatformError` if it has any."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            raise PlatformError(f"a storage to restore has {storage.nbytes()} bytes already: it was resized by others")
        self.platform.restore_storage(storage, nbytes)
        with self._lock:
            self._note_peak()

    @contextmanager
    def one_change(self) -> Iterator[None]:
        """Many allocations or restores by this thread, none of them released inside: the peak is measured once, at the
        end. Other threads wait."""
        with self._lock:
            self._peak_later = True
            try:
                yield
            finally:
                self._peak_later = False
                self._note_peak()

    def forget(self, kind: str) -> None:
        """Stop counting a kind; its tensors live on."""
        with self._lock:
            self._book(kind).clear()

    def usage(self) -> dict[str, int]:
        """Bytes per kind: the sum of `nbytes` over the live storages of that kind."""
        with self._lock:
            return {kind: self._measure(kind) for kind in KINDS}

    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.usage().values())

    @property
    def free_bytes(self) -> int:
        """Bytes that no storage has, held by the device allocator of this process for the next one: what it has from
        the system is `total` and these."""
        return self.platform.free_bytes()

    @property
    def peak(self) -> int:
        """Largest `total` at any adoption, allocation or restore since `reset_peak`, in bytes."""
        return self._peak

    def reset_peak(self) -> None:
        with self._lock:
            self._peak = self.total()

    def census(self, exclude: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of all live tensors of this process on the device, found by the garbage collector instead of the books.

        Each storage counts once, gradients included; buffers of every `HostPool` and the storages of `exclude` do not.
        Tensors that only C++ holds (an autograd graph) are not found.
        """
        skip = {t.untyped_storage()._cdata for t in exclude}
        for pool in list(_pools):
            skip |= {b.untyped_storage()._cdata for b in pool.buffers()}
        found: dict[int, int] = {}
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):
                continue
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is None or tensor.device.type != self.platform.name or tensor.layout is not torch.strided:
                    continue
                storage = tensor.untyped_storage()
                if storage._cdata not in skip:
                    found[storage._cdata] = storage.nbytes()
        return sum(found.values())

    def _book(self, kind: str) -> dict[int, StorageWeakRef]:
        if kind not in self._kinds:
            raise PlatformError(f"{kind!r} is no kind of device memory; kinds are {', '.join(KINDS)}")
        return self._kinds[kind]

    def _measure(self, kind: str) -> int:
        books = self._kinds[kind]
        total = 0
        for key, ref in list(books.items()):
            storage = storage_of(ref)
            if storage is None:
                del books[key]
            else:
                total += storage.nbytes()
        return total

    def _note_peak(self) -> None:
        if not self._peak_later:
            self._peak = max(self._peak, self.total())


def power_of_two_pieces(nbytes: int) -> list[int]:
    """`nbytes` cut into powers of two, at most `LARGEST_PIECE` each, and a rest that is a sixteenth of them or less;
    what is small stays whole."""
    pieces, left = [], nbytes
    while left > max(min(nbytes, LARGEST_PIECE) // 16, SMALL_PIECE):
        pieces.append(min(1 << (left.bit_length() - 1), LARGEST_PIECE))
        left -= pieces[-1]
    return [*pieces, left] if left else pieces


class HostPool:
    """Host buffers that are used again: allocating and pinning them costs more than filling them. Thread-safe.

    A buffer is a list of pieces, because device runtimes round what they pin up to a power of two: 17 GB would take 32.
    """

    def __init__(self, platform: Platform | None = None) -> None:
        self._platform = platform or current()
        self._free: dict[int, list[torch.Tensor]] = {}  # by size
        self._all: list[torch.Tensor] = []
        self._lock = threading.Lock()
        _pools.add(self)

    def take(self, nbytes: int) -> list[torch.Tensor]:
        """uint8 pieces of together `nbytes`, pinned where the platform can; contents undefined."""
        with self._lock:
            return [self._piece(size) for size in power_of_two_pieces(nbytes)]

    def _piece(self, nbytes: int) -> torch.Tensor:
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        piece = self._platform.pinned(nbytes)
        self._all.append(piece)
        return piece

    def give(self, pieces: Iterable[torch.Tensor]) -> None:
        """Return what `take` handed out."""
        with self._lock:
            for piece in pieces:
                self._free.setdefault(piece.numel(), []).append(piece)

    def buffers(self) -> list[torch.Tensor]:
        """All pieces, in use or not."""
        with self._lock:
            return list(self._all)

    @property
    def made(self) -> int:
        """Pieces that were ever allocated."""
        return len(self._all)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(b.numel() for b in self.buffers())
