"""The kernels of `vocabulary.py` on an NPU. Importing this raises `ImportError` where triton-ascend cannot be used."""

from typing import Any

import torch
import triton.backends.ascend  # noqa: F401 - the stock triton has no such module
from triton.runtime import driver

from cann_kernels.calls import Kernels
from cann_kernels.vocabulary import BLOCK, TAIL, vocabulary_gradient, vocabulary_stats
from mindspeed_asyncflow.errors import PlatformError

_KERNELS = {"stats": vocabulary_stats, "gradient": vocabulary_gradient}

try:
    # Builds a small library against CANN at the first use on a machine; all devices of a machine are alike.
    VECTOR_CORES = int(driver.active.utils.get_device_properties(0)["num_vectorcore"])
except Exception as error:
    raise ImportError(f"triton-ascend finds no NPU driver that it can use: {error!r}") from error


def _run(kernel: str, rows: int, logits: torch.Tensor, *rest: Any) -> None:
    """One program per vector core, and no more than there are rows."""
    grid = (min(rows, VECTOR_CORES),)
    try:
        _KERNELS[kernel][grid](logits, *rest, BLOCK=BLOCK, TAIL=TAIL)
    except Exception as error:
        raise PlatformError(
            f"the Triton-Ascend kernel vocabulary_{kernel} cannot be compiled or launched ({error!r});"
            " with ASYNCFLOW_KERNELS=torch the same is computed by torch"
        ) from error


ON_DEVICE = Kernels(_run)
