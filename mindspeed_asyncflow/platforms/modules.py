"""The modules that megatron's local layer spec lacks, the same on CPU and NPU: RMSNorm, packed core attention, RoPE.

Import after `Platform.prepare_trainer`: this file imports megatron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from mindspeed_asyncflow.platforms import kernels
from mindspeed_asyncflow.platforms.packing import PackedLayout


@dataclass
class PackedBatch(PackedSeqParams):
    """Carries our layout through megatron's layers.

    `qkv_format` is not "thd": in that format megatron rotates positions in a Python loop over samples. Here tokens are
    one long sequence [T, 1, ...] with rotary angles gathered by position, and only core attention knows the samples.
    """

    layout: PackedLayout | None = None

    def __post_init__(self) -> None:
        self.qkv_format = "sbhd"


class RMSNorm(torch.nn.Module):
    """megatron's torch norm refuses sequence parallelism; this one marks its weight for the reduction over TP."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., H]
        return kernels.rms_norm(x, self.weight, self.eps)


class PackedRotary(torch.nn.Module):
    """Rotary angles of the current micro-batch, [T/cp, 1, 1, D], in place of megatron's table by sequence length."""

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq  # float32 [D/2]
        self._angles: torch.Tensor | None = None

    def set_positions(self, positions: torch.Tensor) -> None:
        """positions: int64 [T/cp], of the tokens that this context-parallel rank holds."""
        half = torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq.to(positions.device))
        self._angles = torch.cat((half, half), dim=-1)[:, None, None, :]

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self._angles


class _Exchange(torch.autograd.Function):
    """All-to-all over dimension 0 of [world, ...]; its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(x: torch.Tensor, group: Any) -> torch.Tensor:
    # contiguous before empty_like, which copies strides: gloo fills a strided output wrongly without an error
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.distributed.all_to_all_single(out, x, group=group)
    return out


def tokens_to_heads(x: torch.Tensor, group: Any, cp: int) -> torch.Tensor:
    """Ulysses: [T/cp, N, D] of all heads -> [T, N/cp, D] of this rank's heads, tokens in rank order."""
    t, n, d = x.shape
    x = x.reshape(t, cp, n // cp, d).transpose(0, 1)
    return _Exchange.apply(x, group).reshape(cp * t, n // cp, d)


def heads_to_tokens(x: torch.Tensor, group: Any, cp: int) -> torch.Tensor:
    """Inverse of `tokens_to_heads`."""
    t, n, d = x.shape
    x = _Exchange.apply(x.reshape(cp, t // cp, n, d), group)  # [cp, T/cp, N/cp, D]
    return x.transpose(0, 1).reshape(t // cp, cp * n, d)


class CoreAttention(MegatronModule):
    """Causal attention over packed samples, with grouped queries and Ulysses context parallelism.

    Each context-parallel rank holds a contiguous slice of the packed tokens; inside the exchange a rank sees all tokens
    of its heads, so sample boundaries may fall anywhere.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp = config.context_parallel_size

    def forward(
        self,
        query: torch.Tensor,  # [T/cp, 1, Nq, D]
        key: torch.Tensor,  # [T/cp, 1, Nkv, D]
        value: torch.Tensor,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: PackedBatch | None = None,
    ) -> torch.Tensor:  # [T/cp, 1, Nq * D]
        if packed_seq_params is None or packed_seq_params.layout is None:
            raise TypeError("CoreAttention takes packed samples: pass a PackedBatch with a layout")
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if self.cp == 1:
            return kernels.attention_packed(q, k, v, packed_seq_params.layout, self.scale).unsqueeze(1)
        group = parallel_state.get_context_parallel_group()
        repeat = self.cp // math.gcd(k.shape[1], self.cp)
        if repeat > 1:  # fewer key/value heads than ranks
            k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
        q, k, v = (tokens_to_heads(t, group, self.cp) for t in (q, k, v))
        out = kernels.attention_packed(q, k, v, packed_seq_params.layout, self.scale)
        out = heads_to_tokens(out.view(out.shape[0], q.shape[1], q.shape[2]), group, self.cp)
        return out.reshape(out.shape[0], 1, -1)


def layer_spec(config: Any, vp_stage: int | None) -> Any:
    """megatron's local block spec for this pipeline stage with our norm and core attention put in."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = CoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block
