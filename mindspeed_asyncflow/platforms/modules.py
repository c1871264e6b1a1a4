"""The modules that megatron's local layer spec lacks, the same on CPU and NPU: RMSNorm, packed core attention, RoPE.

Import after `Platform.prepare_trainer`: this file imports megatron.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from mindspeed_asyncflow.platforms import kernels
from mindspeed_asyncflow.platforms.experts import GroupedExperts
from mindspeed_asyncflow.platforms.experts_overlap import OverlappedMoELayer
from mindspeed_asyncflow.platforms.latent import LatentAttention
from mindspeed_asyncflow.platforms.packing import PackedLayout
from mindspeed_asyncflow.platforms.ring import GroupRing, ring_attention
from mindspeed_asyncflow.platforms.striping import RingLayout


@dataclass
class PackedBatch(PackedSeqParams):
    """Carries our layout and rotary angles through megatron's layers to `CoreAttention`.

    `qkv_format` is not "thd": in that format megatron rotates positions in a Python loop over samples. Here tokens are
    one long sequence [T, 1, ...], and only core attention knows samples and positions.
    """

    layout: PackedLayout | RingLayout | None = None  # of all T tokens on every rank; RingLayout: ring attention
    cos: torch.Tensor | None = None  # float32 [T/cp, 1, D/2]
    sin: torch.Tensor | None = None
    rows: torch.Tensor | None = None  # int64 [N], positions that the last layer hands on; None: all

    def __post_init__(self) -> None:
        self.qkv_format = "sbhd"

    @classmethod
    def make(
        cls,
        layout: PackedLayout | RingLayout,
        positions: torch.Tensor,
        inv_freq: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> PackedBatch:
        """positions: int64 [T/cp], of the tokens that this context-parallel rank holds; inv_freq: float32 [D/2]."""
        angles = torch.outer(positions.to(inv_freq.dtype), inv_freq)[:, None, :]
        return cls(layout=layout, cos=angles.cos(), sin=angles.sin(), rows=rows)


class NoRotary(torch.nn.Module):
    """Stands where megatron keeps its rotary table: angles come with the batch, so layers get none from here."""

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq  # float32 [D/2]

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None


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


class SwigluMLP(MLP):
    """megatron's dense MLP with the gated activation as one operator."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            config,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(kernels.swiglu(gate_up))


class LastLayer(TransformerLayer):
    """The last layer of the model: behind its attention only the positions of `PackedBatch.rows` are computed.

    Nothing attends to its output, so the feed-forward part of a prompt token there would serve nobody.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        kwargs.pop("dynamic_inference_decode_only", None)
        hidden, context = self._forward_attention(*args, **kwargs)
        rows = kwargs["packed_seq_params"].rows
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        return self._forward_mlp(hidden), context


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
    """Causal attention over packed samples, with grouped queries and context parallelism.

    Ulysses: each context-parallel rank holds a contiguous slice of the packed tokens; inside the exchange a rank sees
    all tokens of its heads, so sample boundaries may fall anywhere. Ring, where the batch has a `RingLayout`: each rank
    holds a stripe of the tokens, with all heads.
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
        self.rotates = not config.multi_latent_attention  # there only a part of each head is rotated, before
        self.swaps = False

    def forward(
        self,
        query: torch.Tensor,  # [T/cp, 1, Nq, D]
        key: torch.Tensor,  # [T/cp, 1, Nkv, D]
        value: torch.Tensor,  # [T/cp, 1, Nkv, Dv]
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: PackedBatch | None = None,
    ) -> torch.Tensor:  # [T/cp, 1, Nq * Dv]
        layout, cos, sin = (getattr(packed_seq_params, name, None) for name in ("layout", "cos", "sin"))
        if layout is None or cos is None or sin is None:
            raise TypeError("CoreAttention takes packed samples: pass PackedBatch.make(...) as packed_seq_params")
        if not self.swaps:
            return self._attend(query, key, value, layout, cos, sin)
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device):
            return self._attend(query, key, value, layout, cos, sin)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout | RingLayout,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = (t.squeeze(1) for t in (query, key, value))
        if self.rotates:
            q, k = (kernels.rotary(t, cos, sin) for t in (q, k))
        if isinstance(layout, RingLayout):
            ring = GroupRing(parallel_state.get_context_parallel_group())
            return ring_attention(q, k, v, layout, self.scale, ring).unsqueeze(1)
        if self.cp == 1:
            return kernels.attention_packed(q, k, v, layout, self.scale).unsqueeze(1)
        group = parallel_state.get_context_parallel_group()
        repeat = self.cp // math.gcd(k.shape[1], self.cp)
        if repeat > 1:  # fewer key/value heads than ranks
            k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
        q, k, v = (tokens_to_heads(t, group, self.cp) for t in (q, k, v))
        out = kernels.attention_packed(q, k, v, layout, self.scale)
        out = heads_to_tokens(out.view(out.shape[0], q.shape[1], v.shape[2]), group, self.cp)
        return out.reshape(out.shape[0], 1, -1)


def swap_attention(chunks: Sequence[torch.nn.Module], on: bool) -> None:
    """Whether what attention keeps for the backward pass waits in pinned host memory. Nothing changes on a CPU."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, CoreAttention):
                module.swaps = on


def _to_host(tensor: torch.Tensor) -> Any:
    # masks and indices are shared by all layers
    if tensor.device.type == "cpu" or not tensor.is_floating_point():
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # both copies are in order with the operators of this stream
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _to_device(kept: Any) -> torch.Tensor:
    return kept if isinstance(kept, torch.Tensor) else kept[1].to(kept[0], non_blocking=True)


def layer_spec(config: Any, vp_stage: int | None, overlap: bool = False) -> Any:
    """megatron's local block spec for this pipeline stage with our norm and core attention put in; `overlap`: experts
    send and compute at the same time."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = CoreAttention
        if config.multi_latent_attention:
            parts.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = RMSNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if getattr(parts.mlp, "module", None) is MLP:  # one spec object may stand for several layers
            parts.mlp = SwigluMLP
        elif overlap:
            parts.mlp = OverlappedMoELayer
        elif config.moe_grouped_gemm:
            parts.mlp.submodules.experts = ModuleSpec(GroupedExperts)
    if parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage):
        block.layer_specs[-1] = replace(block.layer_specs[-1], module=LastLayer)
    block.layer_norm = RMSNorm
    return block
