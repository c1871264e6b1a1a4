"""Triton source to linalg IR, as the Ascend backend of Triton does it before it calls the device compiler.

Runs in the environment of scripts/kernel_tools.sh: triton-ascend, without torch and without CANN.
"""

from typing import Any

from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cann_kernels import vocabulary

KERNELS = {"stats": vocabulary.vocabulary_stats, "gradient": vocabulary.vocabulary_gradient}
DTYPES = ("bf16", "fp32")


def signature(kernel: Any, dtype: str) -> dict[str, str]:
    """Type of every argument of a kernel for logits of `dtype`, in Triton's words."""
    special = {"logits": f"*{dtype}", "gradient": f"*{dtype}", "targets": "*i32", "inverse_temperature": "fp32"}
    special |= {"BLOCK": "constexpr", "TAIL": "constexpr"}
    integers = dict.fromkeys(vocabulary.NUMBERS, "i32")
    return {name: special.get(name) or integers.get(name, "*fp32") for name in kernel.arg_names}


def to_linalg(kernel: Any, dtype: str, block: int, tail: int) -> str:
    """Linalg IR of one kernel, as text. Raises `subprocess.CalledProcessError` if it cannot be lowered."""
    backend = AscendBackend(GPUTarget("npu", "Ascend910B3", 0))  # linalg is the same for all: gate.py has the targets
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    source = ASTSource(kernel, signature(kernel, dtype), {"BLOCK": block, "TAIL": tail})
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {**options.__dict__, "hash": "none", "name": kernel.__name__}
    return ttir_to_linalg(make_ttir(module, metadata, options), metadata, options, named_ops=True)
