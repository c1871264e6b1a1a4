"""A stand-in for the device side of torch_npu and HCCL in host memory, with their rules and their asynchrony.

    HCCL         groups are gloo's underneath. A handle's `wait` returns at once, as it only orders a stream there; its
                 `is_completed` tells. Tensors with gaps, types that the operation does not carry, and two messages one
                 way to one peer in a batch are refused.
    side stream  a copy that does not block is carried out when its stream is synchronized, not before, and only to or
                 from pinned memory. A storage that is freed while a copy of it waits is an error.

What the product calls is written down, one list for each of its threads, the same way on both platforms.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_asyncflow.platforms.base import Platform
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.npu import NpuPlatform

# What torch_npu maps to types of HCCL (HCCLUtils.cpp), and of these what a reduction takes (ProcessGroupHCCL.cpp).
CARRIED = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}
REDUCED = CARRIED - {torch.uint8}
DEVICE_BYTES = 1 << 30


class Calls:
    """What was called, by thread: `main`, or the name of a thread of the product."""

    def __init__(self) -> None:
        self.by_thread: dict[str, list[tuple[Any, ...]]] = {}

    def note(self, *call: Any) -> None:
        name = threading.current_thread().name
        self.by_thread.setdefault("main" if name == "MainThread" else name, []).append(call)


class Stream:
    """Copies that wait."""

    def __init__(self) -> None:
        self.waiting: list[tuple[set[int], Callable[[], object]]] = []

    def synchronize(self) -> None:
        while self.waiting:
            self.waiting.pop(0)[1]()


class Runtime:
    """`torch.npu`, and the tensor operations that its streams defer."""

    def __init__(self) -> None:
        self._now = threading.local()
        self._streams: list[Stream] = []
        self.pinned: set[int] = set()  # addresses of storages
        self.taken = 0  # bytes that groups have

    def as_module(self) -> SimpleNamespace:
        return SimpleNamespace(
            Stream=self._new_stream, stream=self._inside, synchronize=self._synchronize, set_device=lambda device: None,
            current_device=lambda: 0, empty_cache=lambda: None, memory_reserved=lambda: 0, memory_allocated=lambda: 0,
            mem_get_info=lambda: (DEVICE_BYTES - self.taken, DEVICE_BYTES),
        )  # fmt: skip

    def _new_stream(self) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]

    @contextmanager
    def _inside(self, stream: Stream) -> Iterator[None]:
        self._now.stream = stream
        yield
        del self._now.stream
        assert not stream.waiting, "a side stream was left with copies that nobody waited for"

    def _synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def copy(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            stream = getattr(self._now, "stream", None)
            if stream is None or not non_blocking:
                return real(target, source)
            touched = {t.untyped_storage().data_ptr() for t in (target, source)}
            assert touched & self.pinned, "a copy that does not block needs pinned memory on the host"
            stream.waiting.append((touched, lambda: real(target, source)))
            return target

        return copy_

    def check_free(self, storage: torch.UntypedStorage) -> None:
        waiting = [place for stream in self._streams for places, _ in stream.waiting for place in places]
        assert storage.data_ptr() not in waiting, "a storage was freed under a copy that is still to be done"


class Handle:
    """Of an operation of HCCL."""

    def __init__(self, works: list[Any]) -> None:
        self._done, self._failed = threading.Event(), False
        threading.Thread(target=self._finish, args=(works,), daemon=True).start()

    def _finish(self, works: list[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError:
            self._failed = True
        self._done.set()

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and not self._failed


class StandInNpu(NpuPlatform):
    """The platform of NPUs, whose device is the host."""

    def __init__(self, calls: Calls, runtime: Runtime) -> None:
        self._calls, self._runtime = calls, runtime

    def device(self, physical_id: int | None = None) -> torch.device:
        return torch.device("cpu")

    def release_storage(self, storage: Any) -> None:
        self._runtime.check_free(storage)
        self._calls.note("release", storage.nbytes())
        super().release_storage(storage)

    def restore_storage(self, storage: Any, nbytes: int) -> None:
        self._calls.note("restore", nbytes)
        super().restore_storage(storage, nbytes)

    def pinned(self, nbytes: int) -> torch.Tensor:
        self._calls.note("pin", nbytes)
        buffer: torch.Tensor = super().pinned(nbytes)
        self._runtime.pinned.add(buffer.untyped_storage().data_ptr())
        return buffer


class NotedCpu(CpuPlatform):
    """The platform of CPUs; the same calls are noted."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def release_storage(self, storage: Any) -> None:
        self._calls.note("release", storage.nbytes())
        super().release_storage(storage)

    def restore_storage(self, storage: Any, nbytes: int) -> None:
        self._calls.note("restore", nbytes)
        super().restore_storage(storage, nbytes)

    def pinned(self, nbytes: int) -> Any:
        self._calls.note("pin", nbytes)
        return super().pinned(nbytes)


class _Patches:
    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """The old value."""
        old = getattr(owner, name, None)
        self._old.append((owner, name, old))
        setattr(owner, name, value)
        return old

    def undo(self) -> None:
        for owner, name, old in reversed(self._old):
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _check(tensors: list[torch.Tensor], types: set[torch.dtype]) -> None:
    for tensor in tensors:
        assert tensor.is_contiguous(), "Tensors must be contiguous"
        assert tensor.dtype in types, f"Unsupported data type {tensor.dtype}"


def _note_collectives(patches: _Patches, calls: Calls, runtime: Runtime | None) -> None:
    """Calls of torch.distributed; with a `runtime` they are HCCL's."""
    hccl: set[int] = set()

    def new_group(ranks: Any, backend: str, pg_options: Any, timeout: Any) -> Any:
        calls.note("new_group", tuple(ranks))
        if runtime is None:
            return real_new(ranks, backend=backend, pg_options=pg_options, timeout=timeout)
        assert backend == "hccl"
        runtime.taken += 2 * pg_options.hccl_config["hccl_buffer_size"] << 20
        group = real_new(ranks, backend="gloo", timeout=timeout)
        hccl.add(id(group))
        return group

    def batch(operations: list[Any]) -> list[Any]:
        calls.note("batch", tuple((o.op.__name__, o.tensor.numel(), o.peer) for o in operations))
        if runtime is None:
            return real_batch(operations)
        _check([o.tensor for o in operations], CARRIED)
        ways = [(o.op.__name__, o.peer) for o in operations]
        assert len(set(ways)) == len(ways), f"two messages one way to one peer: {ways}"
        return [Handle(real_batch(operations))]

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any, async_op: bool) -> Any:
        calls.note("all_reduce", tensor.dtype, tensor.numel(), str(op))
        if runtime is None:
            return real_reduce(tensor, op=op, group=group, async_op=async_op)
        _check([tensor], REDUCED)
        return Handle([real_reduce(tensor, op=op, group=group, async_op=True)])

    def get_backend(group: Any = None) -> str:
        return "hccl" if id(group) in hccl else real_backend(group)

    real_new = patches.set(dist, "new_group", new_group)
    real_batch = patches.set(dist, "batch_isend_irecv", batch)
    real_reduce = patches.set(dist, "all_reduce", all_reduce)
    real_backend = patches.set(dist, "get_backend", get_backend)


@contextmanager
def machine(name: str) -> Iterator[tuple[Platform, Calls]]:
    """This process on a stand-in NPU (`npu`) or on its CPU (`cpu`), and what it calls there."""
    patches, calls, runtime = _Patches(), Calls(), Runtime() if name == "npu" else None
    _note_collectives(patches, calls, runtime)
    real_copy = torch.Tensor.copy_

    def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            calls.note("copy", target.nbytes)
        return device_copy(target, source, non_blocking=non_blocking)

    device_copy = real_copy if runtime is None else runtime.copy(real_copy)
    patches.set(torch.Tensor, "copy_", noted)
    platform: Platform
    if runtime is None:
        platform = NotedCpu(calls)
    else:
        real_empty = torch.empty
        patches.set(torch, "empty", lambda *size, pin_memory=False, **how: real_empty(*size, **how))
        patches.set(torch, "npu", runtime.as_module())
        library = ModuleType("torch_npu")
        options = SimpleNamespace(Options=SimpleNamespace)
        library._C = SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=options))  # type: ignore[attr-defined]
        sys.modules["torch_npu"] = library
        platform = StandInNpu(calls, runtime)
    try:
        yield platform, calls
    finally:
        patches.undo()
        sys.modules.pop("torch_npu", None)


@contextmanager
def noted(platform: Platform) -> Iterator[Calls]:
    """What this process calls of its device and of its groups, whatever the platform; nothing is changed."""
    patches, calls = _Patches(), Calls()
    _note_collectives(patches, calls, None)

    def note(owner: Any, name: str, kind: str, size: Callable[..., int]) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **how: Any) -> Any:
            if kind != "copy" or how.get("non_blocking"):
                calls.note(kind, size(*args))
            return real(*args, **how)

        patches.set(owner, name, call)

    note(platform, "release_storage", "release", lambda storage: storage.nbytes())
    note(platform, "restore_storage", "restore", lambda storage, nbytes: nbytes)
    note(platform, "pinned", "pin", lambda nbytes: nbytes)
    note(torch.Tensor, "copy_", "copy", lambda target, *_: target.nbytes)
    try:
        yield calls
    finally:
        patches.undo()


def seconds_of(action: Callable[[], object]) -> tuple[float, BaseException | None]:
    """How long it took, and what it raised."""
    began = time.monotonic()
    try:
        action()
    except Exception as error:  # boundary: the test looks at it
        return time.monotonic() - began, error
    return time.monotonic() - began, None
