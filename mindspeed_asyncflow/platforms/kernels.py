"""One function per operator: the Ascend kernel where torch_npu is loaded, else torch.

The torch versions have hand-written backward passes where autograd's own would walk over memory several times more.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.platforms import mindspeed, vocabulary_torch
from mindspeed_asyncflow.platforms.packing import PackedLayout, SlotIndex

log = get_logger("kernels")

KERNELS_ENV = "ASYNCFLOW_KERNELS"  # auto, or torch: never our own kernels of cann_kernels/

NPU_MASK_SIDE = 2048  # npu_fusion_attention wants this fixed causal mask with sparse_mode 3
NPU_MAX_SAMPLES = 1024  # longest list of sequence ends that it takes

_npu_masks: dict[torch.device, torch.Tensor] = {}
_calls: Counter[str] = Counter()
_in_torch: frozenset[str] = frozenset()


def use_torch_for(functions: Iterable[str]) -> None:
    """From now on these functions of this file ("rms_norm", "swiglu", "rotary", "attention_packed") are computed with
    torch on an NPU too."""
    global _in_torch
    _in_torch = frozenset(functions)


def torch_npu_for(x: torch.Tensor, function: str) -> Any:
    """torch_npu when `x` lives on an NPU and `function` is not to be computed with torch, else None."""
    return sys.modules.get("torch_npu") if x.device.type == "npu" and function not in _in_torch else None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; statistics in fp32. x: [..., H], weight: [H]."""
    npu = torch_npu_for(x, "rms_norm")
    if npu is not None:
        return npu.npu_rms_norm(x, weight, epsilon=eps)[0]
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        grad = grads[0].float()
        unit = x.float() * inverse  # x / rms
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        scaled = grad * weight
        # d(x/rms)/dx removes the component along x
        along = (scaled * unit).mean(-1, keepdim=True)
        grad_x = scaled.sub_(unit.mul_(along)).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x = [gate, up] along the last dimension. x: [..., 2F] -> [..., F]."""
    npu = torch_npu_for(x, "swiglu")
    if npu is not None:
        return npu.npu_swiglu(x, dim=-1)
    return _Swiglu.apply(x)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return out


def prepare_grouped_matmul(device: torch.device) -> None:
    """Before the first `grouped_matmul` there; minutes where MindSpeed compiles it. Raises `PlatformError`."""
    if device.type == "npu":
        mindspeed.compile_grouped_matmul()


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows of `x` times the matrix of their group. x: [N, K], group after group; weight: [E, K, M]; counts: int64 [E],
    rows of each group -> [N, M]. On an NPU `weight` may be a transposed view; the operator is MindSpeed's."""
    if torch_npu_for(x, "grouped_matmul") is not None and len(x):
        return mindspeed.grouped_matmul(x, weight, torch.cumsum(counts.to(x.device), 0))
    sizes: list[int] = counts.tolist()
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(sizes), weight)])


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head by the position's angles. x: [T, N, D]; cos, sin: [T, 1, D/2] fp32."""
    npu = torch_npu_for(x, "rotary")
    if npu is not None:
        wide_cos, wide_sin = (torch.cat((t, t), -1)[None].to(x.dtype) for t in (cos, sin))
        return npu.npu_rotary_mul(x[None], wide_cos, wide_sin)[0]
    return _Rotary.apply(x, cos.to(x.dtype), sin.to(x.dtype))


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1.0), None, None  # the inverse of a rotation is its transpose


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (a, b), (left, right) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=left).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=right).addcmul_(a, sin, value=sign)
    return out


class _ToPadded(torch.autograd.Function):
    """[T, ...] tokens -> [P, ...] slots. Both directions are gathers: each token owns exactly one slot."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: SlotIndex) -> torch.Tensor:
        ctx.index = index
        return x.index_select(0, index.token_of_slot)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # a padding slot repeats a token, but nothing real depends on it: its gradient is zero
        return grads[0].index_select(0, ctx.index.slot_of_token), None


class _FromPadded(torch.autograd.Function):
    """[P, ...] slots -> [T, ...] tokens; padding slots get a zero gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: SlotIndex) -> torch.Tensor:
        ctx.index = index
        return x.index_select(0, index.slot_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = grads[0].index_select(0, ctx.index.token_of_slot)
        if ctx.index.padding_slots is not None:
            out.index_fill_(0, ctx.index.padding_slots, 0.0)
        return out, None


def attention_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    """Causal attention inside each sample of a packed sequence.

    q: [T, Nq, D]; k: [T, Nkv, D]; v: [T, Nkv, Dv] with Nkv dividing Nq (grouped queries); returns [T, Nq * Dv].
    """
    if torch_npu_for(q, "attention_packed") is not None:
        return _npu_attention_packed(q, k, v, layout, scale)
    index = layout.index
    if index is not None:
        q, k, v = (_ToPadded.apply(t, index) for t in (q, k, v))
    outs = []
    for bucket in layout.buckets:
        rows = slice(bucket.start, bucket.start + bucket.rows * bucket.length)
        bq, bk, bv = (t[rows].view(bucket.rows, bucket.length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            bq, bk, bv, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )  # [B, Nq, L, Dv]
        outs.append(out.transpose(1, 2).reshape(-1, q.shape[1] * v.shape[2]))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if index is None else _FromPadded.apply(out, index)


def _npu_attention_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    npu = torch_npu_for(q, "attention_packed")
    outs = [
        npu.npu_fusion_attention(
            q[part],
            k[part],
            v[part],
            q.shape[1],
            "TND",
            atten_mask=causal_mask(q.device),
            scale=scale,
            keep_prob=1.0,
            sparse_mode=3,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
        )[0]
        for part, ends in sample_parts(layout.lengths)
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.reshape(out.shape[0], -1)


def causal_mask(device: torch.device) -> torch.Tensor:
    """bool [2048, 2048], true above the diagonal: what `sparse_mode=3` of npu_fusion_attention wants."""
    if device not in _npu_masks:
        full = torch.ones(NPU_MASK_SIDE, NPU_MASK_SIDE, dtype=torch.bool, device=device)
        _npu_masks[device] = torch.triu(full, diagonal=1)
    return _npu_masks[device]


def sample_parts(lengths: Sequence[int]) -> Iterator[tuple[slice, list[int]]]:
    """Tokens of as many samples as npu_fusion_attention takes at once, and where these samples end inside them."""
    first = 0
    for i in range(0, len(lengths), NPU_MAX_SAMPLES):
        ends = list(itertools.accumulate(lengths[i : i + NPU_MAX_SAMPLES]))
        yield slice(first, first + ends[-1]), ends
        first += ends[-1]


def vocabulary_path(logits: torch.Tensor, operator: str) -> Callable[..., Any]:
    """The `stats` or `gradient` function to call for these logits. The call is counted, the first of a path logged.

    Triton-Ascend kernels for bf16 and fp32 on an NPU; torch elsewhere, where the kernels cannot be loaded, and with
    ASYNCFLOW_KERNELS=torch. Raises `PlatformError` for another value of that variable.
    """
    choice = os.environ.get(KERNELS_ENV, "auto")
    if choice not in ("auto", "torch"):
        raise PlatformError(f"{KERNELS_ENV}={choice!r} is neither auto nor torch")
    compiled = choice == "auto" and logits.device.type == "npu" and logits.dtype in (torch.bfloat16, torch.float32)
    found = _triton_kernels() if compiled else None
    path = f"vocabulary_{operator}/{'torch' if found is None else 'triton'}"
    if path not in _calls:
        log.info("%s runs for the first time, for %s logits on %s", path, logits.dtype, logits.device.type)
    _calls[path] += 1
    return getattr(found or vocabulary_torch, operator)


def path_calls() -> dict[str, int]:
    """How often each path of our own kernels ran in this process: `vocabulary_stats/triton` -> calls, and so on."""
    return dict(_calls)


@functools.cache
def _triton_kernels() -> Any:
    try:
        return importlib.import_module("cann_kernels.launch").ON_DEVICE
    except ImportError as error:
        log.warning("the Triton-Ascend kernels cannot be loaded (%s); torch runs instead", error)
        return None
