"""Train state leaves the device and comes back: storages are copied to host buffers and really freed.

    start_out --> copies and frees in a thread of its own, kind by kind --> wait (frees the held kinds)
    start_back (allocates) --> copies back in a thread of its own      --> wait

Work is done per storage, so views (parameters inside a flat buffer, optimizer shards) follow it unseen. Gradients are
freed without a copy and come back as zeros; everything else comes back bit for bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_asyncflow.errors import DeadlineExceeded, PlatformError
from mindspeed_asyncflow.platforms.memory import GRADIENTS, DeviceMemory, HostPool, raw_bytes, storage_of


@dataclass(frozen=True, slots=True)
class SwapReport:
    """One direction of a swap."""

    copied_bytes: int  # over the link between host and device
    moved_bytes: int  # that left the device or came back, zeroed kinds included
    seconds: float  # from the call that started it to the end of the copies


@dataclass(slots=True)
class _Block:
    """One storage."""

    kind: str
    ref: StorageWeakRef
    nbytes: int
    zeroed: bool
    host: list[torch.Tensor] | None = None  # uint8, together [nbytes]
    out: bool = False  # its storage has no bytes
    empty: bool = False  # its storage has bytes again, but not yet its contents

    def bytes_on_device(self, wanted: int) -> torch.Tensor:
        """uint8 [wanted] view of the storage. Raises `PlatformError` if it is gone or has another size."""
        storage = storage_of(self.ref)
        if storage is None:
            raise PlatformError(f"swap: a storage of {self.nbytes} bytes ({self.kind}) was freed by others meanwhile")
        if storage.nbytes() != wanted:
            raise PlatformError(
                f"swap: a storage of {self.nbytes} bytes ({self.kind}) was resized by others: it should have {wanted} "
                f"bytes now and has {storage.nbytes()}"
            )
        return raw_bytes(storage)


class HostSwap:
    """Swaps one set of tensors at a time. Calls come from one thread; the copies run in another."""

    def __init__(self, memory: DeviceMemory, pool: HostPool) -> None:
        self._memory, self._pool = memory, pool
        self._blocks: list[_Block] = []
        self._hold: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._problems: list[PlatformError] = []
        self._report = SwapReport(0, 0, 0.0)

    @property
    def is_out(self) -> bool:
        """Something has left the device, or is about to."""
        return bool(self._blocks)

    @property
    def bytes_out(self) -> int:
        """Device bytes that are wanted to bring everything back."""
        return sum(block.nbytes for block in self._blocks if block.out)

    def start_out(
        self,
        tensors: Mapping[str, Sequence[torch.Tensor]],
        *,
        hold: Collection[str] = (),
        zeroed: Collection[str] = (GRADIENTS,),
    ) -> None:
        """Begin to move all storages behind `tensors` (kind -> tensors) to the host, in the order given.

        Storages of `zeroed` kinds are freed without a copy. Those of `hold` kinds are copied but keep their bytes until
        `wait`, because somebody still reads them; nobody may write any of them from here on. A storage named under two
        kinds belongs to the first, and one without bytes stays as it is. Raises `PlatformError`, with nothing changed,
        for storages that cannot be freed or are counted as another kind.
        """
        self._require_idle()
        if self._blocks:
            raise PlatformError("swap: the last set is still out; bring it back first")
        began = time.monotonic()
        blocks: dict[int, _Block] = {}
        own: dict[str, list[torch.Tensor]] = {kind: [] for kind in tensors}
        for kind, members in tensors.items():
            for tensor in members:
                storage = tensor.untyped_storage()
                if storage.nbytes() == 0 or storage._cdata in blocks:
                    continue
                if not storage.resizable():
                    raise PlatformError(f"swap: a storage of {storage.nbytes()} bytes ({kind}) cannot be freed")
                own[kind].append(tensor)
                blocks[storage._cdata] = _Block(kind, StorageWeakRef(storage), storage.nbytes(), kind in zeroed)
        self._memory.adopt_all(own)
        self._blocks, self._hold = list(blocks.values()), frozenset(hold)
        self._start("out", self._move_out, began)

    def start_back(self) -> None:
        """Give all storages their bytes and begin to copy back. Problems with one do not keep the others away.

        The bytes are allocated in the caller's thread, hence in the stream where they are used.
        """
        self._require_idle()
        began = time.monotonic()
        self._problems = self._restore()
        self._start("back", self._move_back, began)

    def wait(self, timeout_s: float = 600.0) -> SwapReport:
        """End what was started. Raises what went wrong; `back` is possible then, and restores what had left."""
        if self._thread is None:
            raise PlatformError("swap: nothing was started")
        error = self._join(self._thread, timeout_s)
        if error is not None:
            raise error
        if self._blocks:
            for block in self._blocks:
                if not block.out:
                    self._free(block)
            self._memory.platform.free_unused()
        return self._report

    def out(
        self, tensors: Mapping[str, Sequence[torch.Tensor]], *, zeroed: Collection[str] = (GRADIENTS,)
    ) -> SwapReport:
        """`start_out` and `wait`."""
        self.start_out(tensors, zeroed=zeroed)
        return self.wait()

    def back(self) -> SwapReport:
        """`start_back` and `wait`."""
        self.start_back()
        return self.wait()

    def undo(self, timeout_s: float = 600.0) -> None:
        """Everything is on the device again, whatever is under way or went wrong before. Raises what `back` raises."""
        if self._thread is not None:
            self._join(self._thread, timeout_s)
        if self._blocks:
            self.back()

    def _join(self, thread: threading.Thread, timeout_s: float) -> BaseException | None:
        """The end of what was started: what went wrong with it."""
        thread.join(timeout_s)
        if thread.is_alive():
            raise DeadlineExceeded(f"swap: {thread.name} did not end within {timeout_s} s")
        self._thread = None
        error, self._error = self._error, None
        return error

    def _require_idle(self) -> None:
        if self._thread is not None:
            raise PlatformError(f"swap: {self._thread.name} is not waited for yet")

    def _start(self, name: str, work: Callable[[Callable[[], None]], tuple[int, int]], began: float) -> None:
        platform = self._memory.platform
        device = platform.device()
        platform.synchronize()  # what the device has been told so far is done before another stream copies

        def run() -> None:
            try:
                with platform.side_stream(device) as finish:
                    copied, moved = work(finish)
                self._report = SwapReport(copied, moved, time.monotonic() - began)
            except BaseException as error:  # boundary: `wait` raises it
                self._error = error

        thread = threading.Thread(target=run, name=f"swap-{name}", daemon=True)
        thread.start()
        self._thread = thread

    def _move_out(self, finish: Callable[[], None]) -> tuple[int, int]:
        copied = 0
        for block in self._blocks:
            if not block.zeroed:
                source = block.bytes_on_device(block.nbytes)
                block.host = self._pool.take(block.nbytes)
                for piece, part in zip(block.host, source.split([p.numel() for p in block.host])):
                    piece.copy_(part, non_blocking=True)
                finish()  # the storage is freed next, and not the host's pieces before they are filled
                copied += block.nbytes
            if block.kind not in self._hold:
                self._free(block)
        return copied, sum(block.nbytes for block in self._blocks)

    def _free(self, block: _Block) -> None:
        self._memory.release(block.bytes_on_device(block.nbytes))
        block.out = True

    def _restore(self) -> list[PlatformError]:
        """Bytes for all storages that are out; returns what went wrong with single ones."""
        problems = []
        with self._memory.one_change():
            for block in self._blocks:
                try:
                    if block.out:
                        self._memory.restore(block.bytes_on_device(0), block.nbytes)
                        block.out, block.empty = False, True
                except PlatformError as error:  # boundary: `wait` raises it when the others are back
                    problems.append(error)
        return problems

    def _move_back(self, finish: Callable[[], None]) -> tuple[int, int]:
        copied, moved = 0, 0
        while self._blocks:  # what an unforeseen error leaves here can be brought back by another call
            block = self._blocks[0]
            if block.empty:
                self._fill(block)
                moved += block.nbytes
                copied += 0 if block.zeroed else block.nbytes
                finish()
            if block.host is not None:
                self._pool.give(block.host)
            del self._blocks[0]
        if self._problems:
            raise self._problems[0]
        return copied, moved

    def _fill(self, block: _Block) -> None:
        target = block.bytes_on_device(block.nbytes)
        if block.host is None:
            target.zero_()
        else:
            for piece, part in zip(block.host, target.split([p.numel() for p in block.host])):
                part.copy_(piece, non_blocking=True)
