"""An emulation of `torch_npu` for tests: device, streams, memory figures, collectives and operators on the host's CPU.

It is strict: what is not emulated raises `AttributeError` with its name, and what the device would refuse is refused.
It checks calls, not hardware. Put the folder above on PYTHONPATH and `import torch_npu` finds this one.
"""

import sys
import types

import torch

from . import _C as _C
from . import _modules, batches, compiled, npu, operators, places, uneven

__version__ = "2.7.1.post8+emulation"
unsupported_dtype: list = []

_names = (  # of operators that are emulated
    "npu_rms_norm",
    "npu_swiglu",
    "npu_rotary_mul",
    "npu_rotary_position_embedding",
    "npu_scaled_masked_softmax",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
)
calls = operators.calls
globals().update({name: getattr(operators, name) for name in _names})

places.install()
npu.install()
batches.install()
compiled.install()
uneven.install()
_modules.install()
torch._register_device_module("npu", npu)


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"torch_npu.{name} is not emulated")


sys.modules[__name__].__class__ = _Module
