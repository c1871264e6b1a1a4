"""`torch.npu`: one device, one in-order queue, figures of the bytes that live on it."""

from __future__ import annotations

import contextlib
import gc
import os
import struct
import threading
import time
import types
from typing import Any

import torch

from . import places

events: list[tuple] = []  # what was asked of the device, in order
_peak = [0]
_threads = threading.local()
_seed = [0, 0]  # seed, offset


def _visible() -> int:
    listed = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    return len(listed.split(",")) if listed else int(os.environ.get("EMULATED_NPUS", "1"))


def is_available() -> bool:
    return _visible() > 0


def device_count() -> int:
    return _visible()


def init() -> None:
    places.enter()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def is_initialized() -> bool:
    return True


def set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if not 0 <= index < _visible():
        raise RuntimeError(f"invalid device ordinal {index}: {_visible()} visible (107001)")
    events.append(("set_device", index))
    _threads.device = index
    places.enter()


def current_device() -> int:
    places.enter()
    return 0  # every tensor says npu:0, whatever the number of the device


def get_device_name(device: Any = None) -> str:
    return "Ascend910B3"


def get_device_capability(device: Any = None) -> None:
    return None


def get_device_properties(device: Any = None) -> Any:
    return types.SimpleNamespace(name=get_device_name(), total_memory=64 << 30, multi_processor_count=24)


def synchronize(device: Any = None) -> None:
    events.append(("synchronize",))


class Event:
    """Times are wall-clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


class Stream:
    """Work on the CPU is in order, so every stream is the same queue."""

    npu_stream = cuda_stream = stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None: ...

    @property
    def device(self) -> torch.device:
        return torch.device("npu", 0)

    def synchronize(self) -> None:
        events.append(("stream.synchronize",))

    def wait_stream(self, other: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: Any) -> None: ...


_queue = Stream()


def current_stream(device: Any = None) -> Stream:
    return _queue


default_stream = current_stream


@contextlib.contextmanager
def stream(side: Stream | None) -> Any:
    places.enter()
    events.append(("stream",))
    yield side


StreamContext = stream


def set_stream(side: Stream) -> None: ...


@contextlib.contextmanager
def device(index: Any) -> Any:
    yield


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_allocated(device: Any = None) -> int:
    """Bytes of the storages on the device that a Python tensor refers to."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and places.side(thing) == places.NPU:
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    total = sum(found.values())
    _peak[0] = max(_peak[0], total)
    return total


def max_memory_allocated(device: Any = None) -> int:
    memory_allocated()
    return _peak[0]


def memory_reserved(device: Any = None) -> int:
    """As if the allocator kept a tenth more than it gave away."""
    return memory_allocated() * 11 // 10


max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    _peak[0] = 0


reset_max_memory_allocated = reset_peak_memory_stats


def memory_stats(device: Any = None) -> dict[str, int]:
    return {"allocated_bytes.all.current": memory_allocated(), "reserved_bytes.all.current": memory_reserved()}


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = get_device_properties().total_memory
    return total - memory_reserved(), total


def empty_cache() -> None:
    events.append(("empty_cache",))


# -- random numbers: a state of 16 bytes, as the device has it --------------------------------------------------------


class Generator:
    """Seed and offset; the numbers themselves come from the CPU generator."""

    def manual_seed(self, seed: int) -> Generator:
        _seed[:] = [int(seed), 0]
        torch.default_generator.manual_seed(seed)
        return self

    def get_state(self) -> torch.Tensor:
        return torch.tensor(list(struct.pack("<QQ", *_seed)), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        if state.dtype != torch.uint8 or state.numel() != 16:
            raise RuntimeError(f"RNG state is wrong size: expected 16 bytes, got {state.numel()} of {state.dtype}")
        _seed[:] = struct.unpack("<QQ", bytes(state.tolist()))

    clone_state = graphsafe_get_state = get_state


class _Generators:
    def __getitem__(self, index: int) -> Generator:
        return _generator

    def __len__(self) -> int:
        return 1


_generator = Generator()
default_generators = _Generators()


def manual_seed(seed: int) -> None:
    _generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _generator.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _generator.set_state(state)


def initial_seed() -> int:
    return _seed[0]


# -- the rest ---------------------------------------------------------------------------------------------------------


def _lazy_call(call: Any, **kwargs: Any) -> None:
    call()


def set_compile_mode(**kwargs: Any) -> None:
    events.append(("set_compile_mode", kwargs))


def set_option(options: dict) -> None:
    events.append(("set_option", options))


def is_bf16_supported() -> bool:
    return True


class mstx:
    range_start = staticmethod(lambda *args, **kwargs: 0)
    range_end = staticmethod(lambda *args, **kwargs: None)
    mark = staticmethod(lambda *args, **kwargs: None)


class config:
    allow_internal_format = False


def install() -> None:
    """Collectives of the device: a backend "hccl" over gloo."""
    import torch.distributed as dist

    def create(options: Any, backend_options: Any) -> Any:
        return _Gloo(options.store, options.group_rank, options.group_size, options.timeout)

    class _Gloo(dist.ProcessGroupGloo):
        pass

    dist.Backend.register_backend("hccl", create, extended_api=True, devices=["npu", "cpu"])
    objects = dist.distributed_c10d._get_object_coll_device

    def object_device(group: Any = None) -> str:
        return "npu" if dist.get_backend(group) == "hccl" else objects(group)

    dist.distributed_c10d._get_object_coll_device = object_device
    torch._C._get_accelerator = lambda: torch.device("cpu")  # asked by `barrier`: hooks of a real device are missing
