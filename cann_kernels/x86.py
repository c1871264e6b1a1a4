"""The same linalg IR for this processor, as LLVM IR: passes of BiShengIR, then the translator inside triton-ascend."""

import subprocess
from pathlib import Path

from triton._C.libtriton import ir, llvm

from cann_kernels.gate import tool

TIMEOUT_S = 120
PASSES = (
    "--execution-engine-convert-hivm-to-upstream",
    "--execution-engine-convert-hfusion-to-upstream",
    "--convert-elementwise-to-linalg",
    "--linalg-fuse-elementwise-ops",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--buffer-hoisting",
    "--buffer-loop-hoisting",
    "--buffer-deallocation",
    "--buffer-deallocation-simplification",
    "--bufferization-lower-deallocations",
    "--convert-linalg-to-loops",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--arith-expand=include-bf16=true",  # rounds to nearest even in integers: no help from a C library
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-math-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--reconcile-unrealized-casts",
)


def to_llvm(linalg: Path) -> str:
    """LLVM IR, as text. Raises `RuntimeError` with the compiler's words when a pass fails."""
    lowered = linalg.with_suffix(".llvm.mlir")
    command = [str(tool("bishengir-opt")), str(linalg), *PASSES, "-o", str(lowered)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{linalg.name} cannot be lowered for this processor: {done.stderr.strip()[-500:]}")
    context = ir.context()
    ir.load_dialects(context)
    module = ir.parse_mlir_module(str(lowered), context)
    module.context = context  # it must live as long as the module
    return str(llvm.to_module(module, llvm.context()))
