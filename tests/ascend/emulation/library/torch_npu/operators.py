"""The NPU operators that are called here, in torch, with the rules of their documentation checked.

`calls` counts them by name. An operator wants device tensors and gives device tensors.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import places

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MASK_SIDE = 2048
MOST_SAMPLES = 1024

calls: Counter[str] = Counter()


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        for tensor in places._flat((*args, *kwargs.values())):
            if places.side(tensor) == places.HOST:
                raise RuntimeError(f"{function.__name__}: expected npu tensors, got one on cpu")
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return counted


def _require(holds: bool, operator: str, what: str) -> None:
    if not holds:
        raise RuntimeError(f"{operator}: {what}")


@_operator
def npu_rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06) -> tuple[torch.Tensor, torch.Tensor]:
    name = "npu_rms_norm"
    _require(self.dtype in FLOATS and gamma.dtype in FLOATS, name, f"{self.dtype} of x, {gamma.dtype} of gamma")
    _require(gamma.shape == self.shape[-gamma.dim() :], name, f"gamma {tuple(gamma.shape)} of x {tuple(self.shape)}")
    _require(isinstance(epsilon, float), name, f"epsilon {epsilon!r} is no float")
    wide = self.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse).to(self.dtype) * gamma, inverse


@_operator
def npu_swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    _require(self.dtype in FLOATS, "npu_swiglu", f"{self.dtype} of x")
    _require(self.shape[dim] % 2 == 0, "npu_swiglu", f"dimension {dim} of {tuple(self.shape)} is odd")
    gate, up = self.chunk(2, dim)
    return F.silu(gate) * up


@_operator
def npu_rotary_mul(self: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half") -> torch.Tensor:
    name = "npu_rotary_mul"
    _require(self.dim() == 4 and r1.dim() == 4 and r1.shape == r2.shape, name, "all three must have four dimensions")
    _require(self.dtype == r1.dtype == r2.dtype, name, f"{self.dtype}, {r1.dtype} and {r2.dtype} differ")
    _require(self.shape[-1] == r1.shape[-1] and self.shape[-1] % 2 == 0, name, f"head size {self.shape[-1]}")
    _require(
        all(b in (1, a) for a, b in zip(self.shape, r1.shape)), name, f"{tuple(r1.shape)} of x {tuple(self.shape)}"
    )
    _require(rotary_mode in ("half", "interleave"), name, f"rotary_mode {rotary_mode!r}")
    return _rotated(self, r1, r2, rotary_mode == "half")


@_operator
def npu_rotary_position_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int = 0) -> torch.Tensor:
    _require(mode in (0, 1) and x.dim() == 4, "npu_rotary_position_embedding", f"mode {mode}, shape {tuple(x.shape)}")
    return _rotated(x, cos, sin, mode == 0).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> torch.Tensor:
    if halves:
        a, b = x.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


@_operator
def npu_scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0, fixed_triu_mask: bool = False
) -> torch.Tensor:
    _require(
        x.dim() == 4 and not fixed_triu_mask, "npu_scaled_masked_softmax", "four dimensions and a mask of one's own"
    )
    return torch.softmax((x.float() * scale).masked_fill(mask.bool(), -10000.0), -1).to(x.dtype)


@_operator
def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
) -> tuple[Any, ...]:
    """Training attention: layouts SBH, BNSD, BSND and TND; causal only with the mask that the sparse mode wants."""
    name = "npu_fusion_attention"
    _require(query.dtype in FLOATS and query.dtype == key.dtype == value.dtype, name, f"{query.dtype}, {key.dtype}")
    _require(keep_prob == 1.0 and pse is None and padding_mask is None, name, "dropout and pse are not emulated")
    _require(sparse_mode in (0, 2, 3), name, f"sparse_mode {sparse_mode} is not emulated")
    if sparse_mode in (2, 3):
        _require(
            atten_mask is not None and atten_mask.shape[-2:] == (MASK_SIDE, MASK_SIDE),
            name,
            f"sparse_mode {sparse_mode} wants the compressed mask of {MASK_SIDE} x {MASK_SIDE}",
        )
        assert atten_mask is not None
        _require(atten_mask.dtype in (torch.bool, torch.uint8), name, f"atten_mask of {atten_mask.dtype}")
        corner = atten_mask.reshape(-1, MASK_SIDE, MASK_SIDE)[0]
        _require(bool(corner[0, 1]) and not bool(corner[1, :2].any()), name, "True masks out, above the diagonal")
    ends = (actual_seq_qlen, actual_seq_kvlen)
    if input_layout == "TND":
        return _packed(query, key, value, head_num, ends, sparse_mode, atten_mask, scale, softmax_layout)
    _require(softmax_layout == "", name, f"softmax_layout belongs to TND, not to {input_layout}")
    _require(ends == (None, None), name, f"sequence ends belong to TND, not to {input_layout}")
    heads = {"SBH": _of_sbh, "BSND": lambda x, n: x.transpose(1, 2), "BNSD": lambda x, n: x}
    _require(input_layout in heads, name, f"layout {input_layout!r} is not emulated")
    size = query.shape[-1] // head_num if input_layout == "SBH" else query.shape[-1]
    q, k, v = (heads[input_layout](x, x.shape[-1] // size) for x in (query, key, value))
    _require(q.shape[1] == head_num, name, f"head_num {head_num}, query has {q.shape[1]}")
    out, top, total = _attend(q, k, v, atten_mask if sparse_mode == 0 else None, sparse_mode, scale)
    if input_layout == "SBH":
        out = out.permute(2, 0, 1, 3).flatten(2)
    elif input_layout == "BSND":
        out = out.transpose(1, 2)
    return out, top, total, query.new_empty(0), 0, 0, 0


def _of_sbh(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3)


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    ends: tuple[Any, Any],
    sparse_mode: int,
    mask: torch.Tensor | None,
    scale: float,
    softmax_layout: str,
) -> tuple[Any, ...]:
    name = "npu_fusion_attention (TND)"
    _require(softmax_layout in ("", "TND"), name, f"softmax_layout {softmax_layout!r}")
    _check_packed(name, query, key, value, head_num, ends)
    _require(sparse_mode in (2, 3) or mask is None, name, "a full mask of packed samples is not emulated")
    parts = []
    for of_queries, of_keys in _samples(*ends):
        q, k, v = (x.permute(1, 0, 2)[None] for x in (query[of_queries], key[of_keys], value[of_keys]))
        out, top, total = _attend(q, k, v, None, sparse_mode, scale)
        if softmax_layout == "TND":
            top, total = (t[0].permute(1, 0, 2) for t in (top, total))
        else:  # sample after sample, and in a sample head after head, whatever the shape says
            top, total = (t.reshape(-1, head_num, 8) for t in (top, total))
        parts.append((out[0].permute(1, 0, 2), top, total))
    out, top, total = (torch.cat(list(part)) for part in zip(*parts))
    return out, top, total, query.new_empty(0), 0, 0, 0


def _check_packed(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, ends: tuple[Any, Any]
) -> None:
    _require(query.dim() == key.dim() == value.dim() == 3, name, "three dimensions [T, N, D]")
    _require(
        head_num == query.shape[1] and head_num % key.shape[1] == 0, name, f"{head_num} heads, {key.shape[1]} keys"
    )
    for listed, tensor in zip(ends, (query, key)):
        _require(isinstance(listed, list), name, f"sequence ends are a list, not {type(listed).__name__}")
        _require(all(type(end) is int for end in listed), name, "sequence ends are Python integers")
        _require(len(listed) <= MOST_SAMPLES, name, f"{len(listed)} sequences, at most {MOST_SAMPLES}")
        _require(listed == sorted(listed) and listed[-1] == len(tensor), name, f"ends ...{listed[-1]} of {len(tensor)}")


def _samples(ends: list[int], key_ends: list[int]) -> list[tuple[slice, slice]]:
    return [(slice(a, b), slice(c, d)) for a, b, c, d in zip([0, *ends], ends, [0, *key_ends], key_ends)]


@_operator
def npu_fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor,
    softmax_sum: torch.Tensor,
    attention_in: torch.Tensor,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    softmax_layout: str = "",
) -> tuple[Any, ...]:
    """Causal gradient of packed samples, from the statistics and the output that it is given and not from its own."""
    name = "npu_fusion_attention_grad"
    ends = (actual_seq_qlen, actual_seq_kvlen)
    _require(input_layout == "TND" and sparse_mode == 3, name, f"not emulated: {input_layout}, mode {sparse_mode}")
    _require(keep_prob == 1.0 and atten_mask is not None, name, "dropout, or no mask: not emulated")
    _require(softmax_layout == "TND", name, f"softmax_layout {softmax_layout!r} is not emulated")
    _check_packed(name, query, key, value, head_num, ends)
    _require(dy.shape == attention_in.shape == (*query.shape[:2], value.shape[2]), name, f"dy {tuple(dy.shape)}")
    _require(query.dtype == key.dtype == value.dtype == dy.dtype == attention_in.dtype, name, "types differ")
    for statistics in (softmax_max, softmax_sum):
        _require(statistics.shape == (*query.shape[:2], 8), name, f"statistics {tuple(statistics.shape)}")
        _require(statistics.dtype == torch.float32 and statistics.is_contiguous(), name, f"{statistics.dtype}, strided")
    parts = []
    for of_queries, of_keys in _samples(*ends):
        top, total = (t[of_queries].permute(1, 0, 2)[..., :1] for t in (softmax_max, softmax_sum))
        given = (
            t[part].float().permute(1, 0, 2)
            for t, part in (
                (query, of_queries),
                (key, of_keys),
                (value, of_keys),
                (attention_in, of_queries),
                (dy, of_queries),
            )
        )
        parts.append(_gradients(*given, top, total, scale_value))
    dq, dk, dv = (torch.cat(list(part), dim=1).permute(1, 0, 2).to(query.dtype) for part in zip(*parts))
    return dq, dk, dv, query.new_empty(0)


def _gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one sample, [N, S, D]; the mask begins at the lower right corner."""
    heads = k.shape[0]
    k, v = (t.repeat_interleave(q.shape[0] // heads, 0) for t in (k, v))
    scores = (q @ k.mT) * scale
    upper = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1 + k.shape[1] - q.shape[1])
    weights = torch.exp(scores.masked_fill(upper, float("-inf")) - top) / total
    dscores = weights * (dout @ v.mT - (out * dout).sum(-1, keepdim=True)) * scale
    dk, dv = (t.view(heads, -1, *t.shape[1:]).sum(1) for t in (dscores.mT @ q, weights.mT @ dout))
    return dscores @ k, dk, dv


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sparse_mode: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, N, S, D] -> output, and maximum and sum of the softmax [B, N, S, 8]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    queries, keys = scores.shape[-2:]
    if sparse_mode in (2, 3):
        shift = keys - queries if sparse_mode == 3 else 0
        upper = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1 + shift)
        scores = scores.masked_fill(upper, float("-inf"))
    elif mask is not None:
        scores = scores.masked_fill(mask.bool(), float("-inf"))
    top = scores.amax(-1, keepdim=True).detach()
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    out = ((weights / total) @ v.float()).to(q.dtype)
    return out, top.expand(*top.shape[:-1], 8), total.detach().expand(*total.shape[:-1], 8)
