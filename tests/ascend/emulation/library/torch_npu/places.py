"""An "npu" device without hardware: bytes lie in host memory, and every storage knows on which side it is.

A storage is on the NPU, on the host, or of unknown side (what torch's own C++ makes in between). A dispatch mode passes
the side from the inputs of an operator to its outputs and refuses what a device would refuse: operators over both
sides, `numpy()` of a device tensor, a collective of the device backend over host memory or over strided tensors.
`Tensor.device` tells the side. Modes belong to threads: `enter` is called for each thread that names its device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

NPU, HOST = "npu", "cpu"
ACCELERATORS = ("npu", "cuda")
FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn"),
    *("randint", "randperm", "empty_strided", "tril_indices", "triu_indices"),
)
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
NEW = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")

_c_device = torch.Tensor.device  # what torch's own memory says: always the host
_threads = threading.local()


def side(tensor: torch.Tensor) -> str | None:
    """NPU, HOST, or None where it was not said."""
    if tensor.layout is not torch.strided:
        return None
    return getattr(tensor.untyped_storage(), "side", None)


def put(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Note the side of the storage of `tensor`."""
    tensor.untyped_storage().side = where
    return tensor


def wanted_side(device: Any) -> str | None:
    """The side that a `device=` argument names; None for None and for others (meta)."""
    if device is None or isinstance(device, bool):
        return None
    if isinstance(device, int):
        return NPU
    kind = device.split(":")[0] if isinstance(device, str) else device.type
    return NPU if kind in ACCELERATORS else HOST if kind == "cpu" else None


def _flat(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


class Sides(TorchDispatchMode):
    """See above. `operators` counts what ran on device tensors, by name."""

    operators: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        inputs = list(_flat((*args, *kwargs.values())))
        sides = [side(t) for t in inputs]
        target = NPU if NPU in sides else None
        if func.namespace == "c10d":
            _check_collective(func, args, inputs, sides)
        elif target and func not in _BOTH_SIDES and not func.name().startswith("aten::index"):
            for tensor, where in zip(inputs, sides):
                if where == HOST and tensor.dim():
                    raise RuntimeError(f"{func}: tensors on both npu:0 and cpu")
        named = wanted_side(kwargs.get("device"))
        if named == NPU:
            kwargs["device"] = torch.device("cpu")
            target = NPU
        out = func(*args, **kwargs)
        if target:
            Sides.operators[str(func)] = Sides.operators.get(str(func), 0) + 1
            known = {t.untyped_storage()._cdata for t in inputs if side(t)}
            for tensor in _flat(out if isinstance(out, list | tuple) else (out,)):
                if tensor.untyped_storage()._cdata not in known:
                    put(tensor, NPU)
        return out


_BOTH_SIDES = (torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor)


def _check_collective(func: Any, args: Any, inputs: list[torch.Tensor], sides: list[str | None]) -> None:
    groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
    dist = torch.distributed
    if not groups or dist.get_backend(dist.ProcessGroup.unbox(groups[0])) != "hccl":
        return
    for tensor, where in zip(inputs, sides):
        if where == HOST:
            raise RuntimeError(f"{func}: no backend for a tensor on cpu in a group of the backend hccl")
        if not tensor.is_contiguous():
            raise RuntimeError(f"{func}: hccl wants contiguous tensors, got strides {tensor.stride()}")


def enter() -> None:
    """Device tensors of this thread are followed from now on."""
    if not getattr(_threads, "mode", None):
        _threads.mode = Sides()
        _threads.mode.__enter__()


def _placed(make: Callable[..., torch.Tensor], default: str | None) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        where = wanted_side(kwargs.get("device"))
        if where == NPU:
            kwargs["device"] = "cpu"
        pinned = kwargs.pop("pin_memory", False)
        out = make(*args, **kwargs)
        where = where or default or (side(args[0]) if isinstance(args[0], torch.Tensor) else None)
        if out.device.type != "meta" and where:
            known = [a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)]
            if out.untyped_storage()._cdata not in known:
                put(out, where)
        if pinned:
            out.untyped_storage().pinned = True
        return out

    return made


def _device(self: torch.Tensor) -> torch.device:
    if isinstance(self, ShardedTensor):  # answers only what is asked of torch's own property
        return self.local_shards()[0].tensor.device if self.local_shards() else torch.device("npu", 0)
    real = _c_device.__get__(self)
    return torch.device("npu", 0) if real.type == "cpu" and side(self) == NPU else real


def _to(move: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, _non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        where = wanted_side(device)
        here = NPU if side(self) == NPU else HOST
        if device is not None and where is None:
            return move(self, device, dtype or self.dtype)  # meta
        if where is None or where == here:
            return move(self, dtype=dtype or self.dtype, copy=copy, memory_format=layout or torch.preserve_format)
        return put(
            move(self, dtype=dtype or self.dtype, copy=True, memory_format=layout or torch.preserve_format), where
        )

    return to


def _numpy(numpy: Callable[..., Any]) -> Callable[..., Any]:
    def on_host(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if side(self) == NPU:
            raise TypeError("can't convert npu:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return numpy(self, *args, **kwargs)

    return on_host


def _type(type_of: Callable[..., Any]) -> Callable[..., Any]:
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = type_of(self)
            return name.replace("torch.", "torch.npu.", 1) if side(self) == NPU else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.npu.", "torch.").replace("torch.cuda.", "torch.")
        return type_of(self, dtype, *args, **kwargs)

    return type_


def install() -> None:
    """Name the device and change what torch says and makes. Once per process."""
    _device_constructors()  # torch caches the factories by identity: before they are replaced
    torch.utils.rename_privateuse1_backend("npu")
    for name in FACTORIES:
        setattr(torch, name, _placed(getattr(torch, name), HOST))
    for name in LIKE:
        setattr(torch, name, _placed(getattr(torch, name), None))
    for name in NEW:
        setattr(torch.Tensor, name, _placed(getattr(torch.Tensor, name), None))
    from_numpy = torch.from_numpy
    torch.from_numpy = lambda array: put(from_numpy(array), HOST)
    tensor = torch.Tensor
    tensor.device = property(_device)
    tensor.is_npu = tensor.is_cuda = property(lambda self: side(self) == NPU)
    tensor.is_cpu = property(lambda self: self.device.type == "cpu")
    tensor.to, tensor.numpy, tensor.type = _to(tensor.to), _numpy(tensor.numpy), _type(tensor.type)
    tensor.cpu = lambda self, *args, **kwargs: self.to("cpu")
    tensor.npu = tensor.cuda = lambda self, *args, **kwargs: self.to("npu")
    tensor.is_pinned = lambda self, *args: bool(getattr(self.untyped_storage(), "pinned", False))
    tensor.pin_memory = _pin
    tensor.record_stream = lambda self, stream: None
    torch.nn.Module.npu = torch.nn.Module.cuda = lambda self, *args: self.to("npu")
    storage = torch.UntypedStorage
    make = storage.__new__

    def new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        where = wanted_side(device)
        made = make(cls, *args, **({} if where else {"device": device} if device is not None else {}), **kwargs)
        if where:
            made.side = where
        return made

    storage.__new__ = new_storage
    enter()


def _pin(self: torch.Tensor, *args: Any) -> torch.Tensor:
    if side(self) == NPU:
        raise RuntimeError("cannot pin 'npu' tensors: only dense CPU tensors can be pinned")
    copy = put(self.clone(), HOST)
    copy.untyped_storage().pinned = True
    return copy
