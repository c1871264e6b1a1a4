"""Multi-head latent attention (DeepSeek-V3) over packed samples, the same on CPU and NPU.

Import after `Platform.prepare_trainer`: this file imports megatron.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from mindspeed_asyncflow.platforms import kernels


class LatentAttention(MLASelfAttention):
    """megatron's module with its weights; queries, keys and values are made here.

    megatron rotates by the position in the sequence, here by the angles of the packed batch. Besides, under tensor
    parallelism megatron 0.16 leaves out the sum over ranks of the gradient of the key part that all heads share.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = None

    def get_query_key_value_tensors(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,  # [T/cp/sp, 1, H]
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Query and key [T/cp, 1, N/tp, nope + rope], value [T/cp, 1, N/tp, V]."""
        config, heads = self.config, self.num_attention_heads_per_partition
        if config.q_lora_rank is None:
            query, _bias = self.linear_q_proj(hidden_states)
        else:
            latent = self._gathered(self.linear_q_down_proj, hidden_states)
            query, _bias = self.linear_q_up_proj(self.q_layernorm(self._scattered(latent)))
        latent = self._gathered(self.linear_kv_down_proj, hidden_states)
        latent, shared = latent.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        key_value, _bias = self.linear_kv_up_proj(self.kv_layernorm(self._scattered(latent)))
        if config.tensor_model_parallel_size > 1:
            shared = copy_to_tensor_model_parallel_region(shared)  # its gradient is the sum over all ranks' heads
        query = query.view(len(query), heads, self.q_head_dim)
        key, value = key_value.view(len(query), heads, -1).split([config.qk_head_dim, config.v_head_dim], dim=-1)
        plain, rotated = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        rotated, shared = (_rotate_pairs(t, packed_seq_params) for t in (rotated, shared))
        query = torch.cat((plain, rotated), dim=-1)
        key = torch.cat((key, shared.expand(-1, heads, -1)), dim=-1)
        return query[:, None], key[:, None], value[:, None], None, None

    def _gathered(self, down: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """The whole latent of all T/cp tokens: `down` is cut over tensor ranks by its rows."""
        latent, _bias = down(hidden_states)
        return (
            gather_from_tensor_model_parallel_region(latent) if self.config.tensor_model_parallel_size > 1 else latent
        )

    def _scattered(self, latent: torch.Tensor) -> torch.Tensor:
        return scatter_to_sequence_parallel_region(latent) if self.config.sequence_parallel else latent


def _rotate_pairs(x: torch.Tensor, batch: Any) -> torch.Tensor:
    """Rotate neighbours (0, 1), (2, 3), ... of x [T, N, D]; the result has first all first, then all second ones."""
    return kernels.rotary(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), batch.cos, batch.sin)
