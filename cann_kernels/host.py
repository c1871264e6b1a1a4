"""Run kernels that `build.py` made for this processor, on torch tensors: one program of the grid after the other.

Needs llvmlite, which the project's environment has for vLLM.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import torch

from cann_kernels.calls import Kernels

PROGRAMS = 3  # of the grid: enough that rows are dealt out, also when there are fewer rows
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_int32, _int64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


def host_kernels(folder: Path) -> Kernels:
    """The kernels that `build.py` left in `folder`; each is compiled at its first call."""
    engines: dict[str, Any] = {}

    def run(kernel: str, rows: int, logits: torch.Tensor, *rest: Any) -> None:
        name = f"{kernel}_{_DTYPES[logits.dtype]}"
        if name not in engines:
            engines[name] = _compile((folder / f"{name}.ll").read_text())
        address = engines[name].get_function_address(f"vocabulary_{kernel}")
        unused = torch.empty(0, dtype=torch.int8)  # a device's lock and workspace
        flat: list[Any] = []
        for value in (unused, unused, logits, *rest):
            if isinstance(value, torch.Tensor):  # a memref: allocation, first element, offset, size, stride
                start = _pointer(value.data_ptr())
                flat += [start, start, _int64(0), _int64(value.numel()), _int64(1)]
            else:
                flat.append(ctypes.c_float(value) if isinstance(value, float) else _int32(value))
        function = ctypes.CFUNCTYPE(None, *(type(value) for value in flat), *[_int32] * 6)(address)
        for program in range(PROGRAMS):
            function(*flat, PROGRAMS, 1, 1, program, 0, 0)

    return Kernels(run)


@ctypes.CFUNCTYPE(None, _int64, _pointer, _pointer)
def _copy(size: int, source: int, target: int) -> None:
    """memrefCopy of MLIR's runtime, for what the kernels copy: one dimension, elements side by side."""
    memrefs = []
    for memref in (source, target):
        rank, descriptor = ctypes.cast(memref, ctypes.POINTER(_int64))[0:2]
        _, aligned, offset, length, stride = ctypes.cast(descriptor, ctypes.POINTER(_int64))[0:5]
        if rank != 1 or (stride != 1 and length > 1):
            raise ValueError(f"a copy of {length} elements with stride {stride} and rank {rank} is not supported")
        memrefs.append((aligned + offset * size, length))
    (start, length), (end, _) = memrefs
    ctypes.memmove(end, start, length * size)


def _compile(text: str) -> Any:
    """Machine code of LLVM IR."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.add_symbol("memrefCopy", ctypes.cast(_copy, _pointer).value)
    module = llvm.parse_assembly(text)
    module.verify()
    features = llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(llvm.get_host_cpu_name(), features, opt=3)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine
