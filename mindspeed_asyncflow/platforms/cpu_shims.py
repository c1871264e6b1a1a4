"""Lets code that is written for an accelerator (megatron-core) run on the CPU of this process.

The CPU twin of `torch_npu.contrib.transfer_to_npu`: it changes *where* code runs, never *what* it computes. Device
names become "cpu", streams become the one in-order CPU queue, "nccl"/"hccl" groups become gloo groups, and the graph
compiler is off. Trainer processes only: `apply` changes the torch module of the whole process and refuses to come
after megatron.core, which binds several of these names at import.

`torch.cuda.is_available()` stays False on purpose: code that asks takes its CPU branch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.cpu import resident_bytes

ACCELERATORS = ("cuda", "npu")
DEVICE_BACKENDS = ("nccl", "hccl", "cuda:nccl", "npu:hccl")
FACTORIES = (
    "tensor",
    "as_tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "linspace",
    "eye",
    "rand",
    "randn",
    "randint",
    "randperm",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "empty_strided",
    "tril_indices",
    "triu_indices",
    "normal",
)
TENSOR_FACTORIES = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")

DEVICE_CALLS = (  # that have nothing to do here
    "set_device",
    "_set_device",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "init",
    "_lazy_init",
    "set_stream",
)

_applied = False


def apply() -> None:
    """Install every shim once. Raises `PlatformError` on a machine with CUDA or after megatron.core was imported."""
    global _applied
    if _applied:
        return
    import torch

    if torch.cuda.is_available():
        raise PlatformError("a CUDA device is present: the CPU platform would hide it; set CUDA_VISIBLE_DEVICES=''")
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise PlatformError("the CPU platform must be prepared before megatron.core is imported in this process")
    _applied = True
    _shim_device(torch)
    _shim_memory(torch)
    _shim_rng(torch)
    _shim_factories(torch)
    _shim_tensor_methods(torch)
    _shim_compile(torch)
    _shim_collectives()
    _shim_uneven_collectives(torch)


def is_accelerator(device: Any) -> bool:
    """Whether a `device=` argument names an accelerator: "cuda", "npu:0", an index, or a torch.device of these."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.split(":")[0] in ACCELERATORS
    return getattr(device, "type", None) in ACCELERATORS


def _nothing() -> Callable[..., None]:
    # a new object at each use: torch._dynamo refuses one function under two torch names
    return lambda *args, **kwargs: None


class Stream:
    """Work on the CPU is in order, so every stream is the same queue."""

    cuda_stream = stream_id = priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: Any) -> None: ...


class Event:
    """Times are wall-clock, so that timers built on events keep their meaning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return (end._at - self._at) * 1e3


class NoGraph:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise PlatformError("device graphs do not exist on the CPU platform; switch them off")


class _OneGenerator:
    """`torch.cuda.default_generators`: each index is the CPU generator."""

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _shim_device(torch: Any) -> None:
    cuda, cpu, queue = torch.cuda, torch.device("cpu"), Stream()
    # megatron passes current_device() as device=..., so it is the device itself and not an index
    cuda.current_device = lambda: cpu
    cuda.device_count = lambda: 1
    for name in DEVICE_CALLS:
        setattr(cuda, name, _nothing())
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.is_initialized = lambda: True
    cuda.get_device_name = lambda *args: "cpu"
    cuda.get_device_capability = lambda *args: (0, 0)
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=resident_bytes()[1]
    )
    cuda.Stream, cuda.ExternalStream, cuda.Event, cuda.CUDAGraph = Stream, Stream, Event, NoGraph
    cuda.current_stream = lambda *args, **kwargs: queue
    cuda.default_stream = lambda *args, **kwargs: queue
    cuda.stream = cuda.StreamContext = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.device = lambda *args, **kwargs: contextlib.nullcontext()
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _nothing())
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()


def _shim_memory(torch: Any) -> None:
    for stem, which in (("memory_allocated", 0), ("memory_reserved", 0)):
        for name, index in ((stem, which), (f"max_{stem}", 1)):
            figure = functools.partial(lambda i, *args, **kwargs: resident_bytes()[i], index)
            setattr(torch.cuda, name, figure)
            if hasattr(torch.cuda.memory, name):
                setattr(torch.cuda.memory, name, figure)
    torch.cuda.reset_peak_memory_stats = _nothing()
    torch.cuda.reset_max_memory_allocated = _nothing()
    torch.cuda.mem_get_info = lambda *args: (0, 0)


def _shim_rng(torch: Any) -> None:
    generator = torch.default_generator

    def seed(value: int) -> None:
        generator.manual_seed(value)

    for module in (torch.cuda, torch.cuda.random):
        module.manual_seed = seed
        module.manual_seed_all = lambda value: seed(value)
        module.get_rng_state = lambda *args, **kwargs: generator.get_state()
        module.set_rng_state = lambda state, *args, **kwargs: generator.set_state(state) and None
    torch.cuda.get_rng_state_all = lambda: [generator.get_state()]
    torch.cuda.set_rng_state_all = lambda states: generator.set_state(states[0]) and None
    torch.cuda.default_generators = _OneGenerator()
    # megatron's tracker warns when the CPU generator moves inside a fork; here it is the device generator
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with an accelerator in `device=` replaced and `pin_memory=True` dropped."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if is_accelerator(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapped


def _shim_factories(torch: Any) -> None:
    # `with torch.device("meta")` knows the factories by identity and caches the set at first use. Fill that cache with
    # the originals first, else transformers' meta initialisation silently leaves inv_freq at zero.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in TENSOR_FACTORIES:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    load = torch.load

    @functools.wraps(load)
    def load_on_cpu(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(file, "cpu" if is_accelerator(map_location) else map_location, *args, **kwargs)

    torch.load = load_on_cpu


def _shim_tensor_methods(torch: Any) -> None:
    for owner in (torch.Tensor, torch.nn.Module):
        move = owner.to

        def to(self: Any, *args: Any, _move: Callable[..., Any] = move, **kwargs: Any) -> Any:
            if args and is_accelerator(args[0]):
                args = ("cpu", *args[1:])
            if is_accelerator(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return _move(self, *args, **kwargs)

        owner.to = to
        owner.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = _nothing()

    # megatron's optimizers sort gradients by type strings such as 'torch.cuda.FloatTensor'
    type_of = torch.Tensor.type

    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return type_of(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return type_of(self, dtype, *args, **kwargs)

    torch.Tensor.type = type_
    autocast = torch.amp.autocast_mode.autocast
    enter = autocast.__init__

    def autocast_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter(self, "cpu" if device_type in ACCELERATORS else device_type, *args, **kwargs)

    autocast.__init__ = autocast_init


def _shim_compile(torch: Any) -> None:
    # megatron binds torch.compile as its fuser at import; each use would start a C++ compiler
    def no_compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        return model if model is not None else (lambda function: function)

    torch.compile = no_compile


def _shim_collectives() -> None:
    import torch.distributed as dist

    for name in ("init_process_group", "new_group"):
        original = getattr(dist.distributed_c10d, name)

        @functools.wraps(original)
        def on_gloo(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            if kwargs.get("backend") in DEVICE_BACKENDS:
                kwargs["backend"] = "gloo"
            if args and isinstance(args[0], str) and args[0] in DEVICE_BACKENDS:
                args = ("gloo", *args[1:])
            kwargs.pop("device_id", None)
            return _original(*args, **kwargs)

        setattr(dist, name, on_gloo)
        setattr(dist.distributed_c10d, name, on_gloo)


def _shim_uneven_collectives(torch: Any) -> None:
    """Device backends take shards of different length along dimension 0; gloo does not."""
    dist = torch.distributed
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_gather)
    def gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        lengths = {len(part) for part in tensor_list if part.dim()}
        if len(lengths) < 2:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in tensor_list]
        all_gather(parts, padded, group=group)
        for out, part in zip(tensor_list, parts):
            out.copy_(part[: len(out)])

    @functools.wraps(reduce_scatter)
    def scatter(output: Any, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False):
        if len({len(part) for part in input_list}) < 2:
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat([part.contiguous() for part in input_list])
        dist.all_reduce(whole, op=op, group=group)
        start = sum(len(part) for part in input_list[: dist.get_rank(group)])
        output.copy_(whole[start : start + len(output)])

    dist.all_gather, dist.reduce_scatter = gather, scatter
