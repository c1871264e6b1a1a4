"""Tiny Hugging Face models, packed samples, and what transformers computes from them: the trainer's reference."""

from typing import Any

import numpy as np
import torch

from mindspeed_asyncflow.records import MicroBatch

VOCAB = 125  # odd: under TP 2 the vocabulary has a padding row
LAYERS, EXPERTS = 4, 4
LENGTHS = (9, 5, 12, 7, 3, 10, 4, 8)


def hf_config(kind: str, **changes: Any) -> Any:
    """Of `kind`, with other sizes where `changes` names them."""
    import transformers

    base = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": kind != "qwen3_moe",
    }
    if kind == "qwen2":
        return transformers.Qwen2Config(**{**base, **changes})
    if kind == "deepseek_v3":
        base |= {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "moe_intermediate_size": 48,
            "num_nextn_predict_layers": 0,
            "tie_word_embeddings": False,
        }
        return transformers.DeepseekV3Config(**{**base, **changes})
    base["head_dim"] = 16
    if kind == "qwen3":
        return transformers.Qwen3Config(**{**base, **changes})
    base |= {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    return transformers.Qwen3MoeConfig(**{**base, **changes})


def make_model(kind: str, folder: str, **changes: Any) -> Any:
    """A model with no trivial weight (random norms and biases), saved to `folder`."""
    import transformers

    torch.manual_seed(5)
    config = hf_config(kind, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * 0.1)
            elif "gate.weight" in name:
                param.normal_(0, 0.5)
            else:
                param.mul_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


def make_samples(lengths: tuple[int, ...] = LENGTHS, seed: int = 3) -> list[dict[str, np.ndarray]]:
    """Token ids, a prompt of at least one token that is not trained, and an advantage per sample."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        mask = np.zeros(length, np.float32)
        mask[max(1, length // 3) - 1 : length - 1] = 1
        samples.append({"ids": rng.integers(0, VOCAB, length), "mask": mask, "advantage": rng.normal(size=())})
    return samples


def pack(samples: list[dict[str, np.ndarray]]) -> MicroBatch:
    lengths = [len(s["ids"]) for s in samples]
    mask = np.concatenate([s["mask"] for s in samples])
    return MicroBatch(
        input_ids=np.concatenate([s["ids"] for s in samples]).astype(np.int64),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        targets=np.concatenate([np.append(s["ids"][1:], 0) for s in samples]).astype(np.int64),
        loss_mask=mask,
        rollout_logprobs=np.zeros(len(mask), np.float32),
        advantages=(np.concatenate([np.full(len(s["ids"]), s["advantage"]) for s in samples]) * mask).astype(
            np.float32
        ),
        sample_index=np.repeat(np.arange(len(samples)), lengths).astype(np.int32),
        rows=np.arange(len(samples)),
    )


def cut(samples: list[Any], sizes: tuple[int, ...]) -> list[MicroBatch]:
    """Micro-batches of `sizes` samples each, in order."""
    batches, first = [], 0
    for size in sizes:
        batches.append(pack(samples[first : first + size]))
        first += size
    assert first == len(samples)
    return batches


def policy_gradient(logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict]:
    """The loss of these tests: - sum(advantage * log-prob)."""
    mask, advantages = torch.from_numpy(batch.loss_mask), torch.from_numpy(batch.advantages)
    loss = -(logprobs * advantages * mask).sum()
    return loss, {
        "loss_sum": loss.detach(),
        "tokens_count": mask.sum(),
        "entropy_sum": (entropy * mask).sum(),
        "logprob_min": logprobs.detach().min(),
    }


def reference(model: Any, samples: list[Any], temperature: float) -> dict[str, Any]:
    """transformers, one sample at a time, without packing: log-probs, entropy sum, loss sum and its gradients."""
    logprobs, loss, entropy = [], torch.zeros(()), torch.zeros(())
    model.zero_grad()
    for sample in samples:
        ids = torch.from_numpy(sample["ids"])[None]
        scores = (model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
        mask = torch.from_numpy(sample["mask"])[:-1]
        picked = scores.gather(1, ids[0, 1:, None]).squeeze(1) * mask
        loss = loss - (picked * float(sample["advantage"])).sum()
        entropy = entropy - ((scores.exp() * scores).sum(-1) * mask).sum()
        logprobs.append(np.append(picked.detach().numpy(), 0.0))
    loss.backward()
    return {
        "logprobs": np.concatenate(logprobs),
        "loss": loss.item(),
        "entropy": entropy.item(),
        "grads": split_experts({name: p.grad.numpy().copy() for name, p in model.named_parameters()}),
        "norm": float(torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))),
    }


def split_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fused expert tensors of transformers 5 under the names of the saved files."""
    out = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for e, one in enumerate(value):
                gate, up = np.split(one, 2)
                stem = f"{name.removesuffix('.gate_up_proj')}.{e}"
                out[f"{stem}.gate_proj.weight"], out[f"{stem}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for e, one in enumerate(value):
                out[f"{name.removesuffix('.down_proj')}.{e}.down_proj.weight"] = one
        else:
            out[name] = value
    return out


def name_of(case):
    """A test's name: family, the sizes that differ from 1, and the data type where it is part of the case."""
    kind, sizes, *dtype = case
    return "-".join([kind, *(f"{k}={v}" for k, v in sizes.items()), *dtype])
