"""The kernels of `vocabulary.py` on an NPU. Importing this raises `ImportError` without triton-ascend."""

from typing import Any

import torch
import triton.backends.ascend  # noqa: F401 - the stock triton has no such module
from triton.runtime import driver

from cann_kernels.calls import Kernels
from cann_kernels.vocabulary import BLOCK, TAIL, vocabulary_gradient, vocabulary_stats

_KERNELS = {"stats": vocabulary_stats, "gradient": vocabulary_gradient}


def _run(kernel: str, rows: int, logits: torch.Tensor, *rest: Any) -> None:
    """One program per vector core, and no more than there are rows."""
    cores = driver.active.utils.get_device_properties(logits.device.index)["num_vectorcore"]
    _KERNELS[kernel][(min(rows, cores),)](logits, *rest, BLOCK=BLOCK, TAIL=TAIL)


ON_DEVICE = Kernels(_run)
