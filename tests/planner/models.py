"""Models and configurations that the planner's tests share."""

from __future__ import annotations

from typing import Any

from mindspeed_asyncflow.config import Config, parse_config
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.work import Work

QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "vocab_size": 500,
    "tie_word_embeddings": False,
}
SMALL: dict[str, Any] = {
    **QWEN_7B,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
}


def work(model: dict[str, Any]) -> Work:
    return Work.of(model)


def configuration(*overrides: str) -> Config:
    """A cluster of 910C dies with answers of about 1000 tokens."""
    text = """
model: {dtype: bfloat16}
data: {max_prompt_tokens: 512}
rollout: {max_new_tokens: 4096}
workload: {prompt_mean: 200, prompt_p95: 400, answer_mean: 1000, answer_p95: 2500}
cluster: {devices: 16}
"""
    return parse_config(text, overrides)


PLAIN = Costs(
    prefill_token_s=1e-5, decode_weights_s=1e-2, decode_context_s=1e-8, train_token_s=1e-4, decode_answer_s=1e-4
)
