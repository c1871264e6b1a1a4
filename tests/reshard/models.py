"""Small models of every family that layouts know, as Hugging Face config dictionaries."""

QWEN2 = dict(
    model_type="qwen2",
    num_hidden_layers=4,
    hidden_size=32,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=64,
    vocab_size=120,
    tie_word_embeddings=False,
)
QWEN2_TIED = QWEN2 | dict(tie_word_embeddings=True, vocab_size=1003)
# 8 query heads, 2 key/value heads of size 4: fewer of the latter than tensor ranks
QWEN2_FEW_KV = QWEN2 | dict(num_key_value_heads=2, head_dim=4)
QWEN3 = QWEN2 | dict(model_type="qwen3", head_dim=16, num_key_value_heads=2)
QWEN3_MOE = QWEN3 | dict(
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
DEEPSEEK = dict(
    model_type="deepseek_v3",
    num_hidden_layers=4,
    hidden_size=32,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=64,
    vocab_size=120,
    q_lora_rank=16,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=16,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
FAMILIES = {
    "qwen2": QWEN2,
    "qwen2_tied": QWEN2_TIED,
    "qwen2_few_kv": QWEN2_FEW_KV,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "deepseek": DEEPSEEK,
}

DEEPSEEK_R1 = dict(  # the published config.json of DeepSeek-R1, sizes only
    model_type="deepseek_v3",
    num_hidden_layers=61,
    hidden_size=7168,
    num_attention_heads=128,
    num_key_value_heads=128,
    intermediate_size=18432,
    vocab_size=129280,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    first_k_dense_replace=3,
)
