"""What MindSpeed compiles from its C++ sources at the first use: found here by the name of the extension."""

from __future__ import annotations

import os
import types
from typing import Any

import torch

from .operators import FLOATS, _operator, _require


@_operator
def npu_gmm(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor],
    group_list: torch.Tensor,
    group_type: int,
    group_list_type: int,
) -> list[torch.Tensor]:
    """Groups along the rows of x [M, K] with weight [E, K, N] (type 0), or along the columns of x [K, M] with weight
    [M, N] (type 2), which gives [E, K, N]. group_list: where each group ends."""
    name, (a,), (b,) = "npu_gmm", x, weight
    _require(a.dtype == b.dtype and a.dtype in FLOATS, name, f"{a.dtype} of x, {b.dtype} of weight")
    _require(not bias and group_list_type == 0, name, "bias and counts are not emulated")
    _require(group_list.dtype == torch.int64 and group_list.dim() == 1, name, f"group_list {group_list.dtype}")
    _require(_plain(a) and _plain(b), name, "x and weight are contiguous, or have their last two dimensions transposed")
    ends = group_list.tolist()
    _require(ends == sorted(ends) and ends[-1] == a.shape[group_type // 2], name, f"groups end at {ends}")
    sizes = [end - start for start, end in zip([0, *ends], ends)]
    if group_type == 2:
        _require(a.dim() == b.dim() == 2 and not a.is_contiguous(), name, "x is the view that transposes [M, K]")
        return [torch.stack([p @ q for p, q in zip(a.split(sizes, 1), b.split(sizes))])]
    _require(group_type == 0 and b.dim() == 3 and len(b) == len(ends), name, f"type {group_type}, weight {b.shape}")
    return [torch.cat([rows @ matrix for rows, matrix in zip(a.split(sizes), b)])]


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or tensor.mT.is_contiguous()


def npu_gmm_backward(
    grad: list[torch.Tensor],
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    group_list: torch.Tensor,
    group_list_type: int,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of x and of weight, as the extension computes them with its own forward."""
    (of_x,) = npu_gmm(grad, [weight[0].mT], [], group_list, 0, group_list_type)
    if weight[0].is_contiguous():
        (of_weight,) = npu_gmm([x[0].mT], grad, [], group_list, 2, group_list_type)
    else:
        (turned,) = npu_gmm([grad[0].contiguous().mT], x, [], group_list, 2, group_list_type)
        of_weight = turned.mT
    return [of_x], [of_weight], []


EXTENSIONS = {"grouped_matmul": types.SimpleNamespace(npu_gmm=npu_gmm, npu_gmm_backward=npu_gmm_backward)}


def load(name: str, **kwargs: Any) -> Any:
    if name not in EXTENSIONS:
        raise RuntimeError(f"the extension {name} is not emulated")
    missing = [source for source in kwargs["sources"] if not os.path.isfile(source)]
    if missing:
        raise RuntimeError(f"the extension {name} has no source {missing[0]}")
    return EXTENSIONS[name]


def install() -> None:
    import torch.utils.cpp_extension

    # the paths of headers are made from it; nothing is compiled
    os.environ.setdefault("ASCEND_HOME_PATH", os.path.dirname(__file__))
    torch.utils.cpp_extension.load = load
